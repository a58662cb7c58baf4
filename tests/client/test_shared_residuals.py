"""A ControlNet's residuals in shared memory: results are those over pipes, bit for bit; it is bounded; it leaves nothing."""

import functools
import gc
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from parallel_backend.client import shared_residuals
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.shared_residuals import SharedResiduals
from parallel_backend.core import pinned
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.families.own_class.call_arguments import to_tensors
from parallel_backend.families.own_class.residuals import CONTROL, for_trial
from parallel_backend.families.own_class.trial import trial
from parallel_backend.families.own_class.tried_calls import Call
from parallel_backend.processes.pool import RankError
from parallel_backend.rank.engine import Engine
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.shared_memory import make_segment, sharing_possible
from testing.cases import all_cases
from tests.emulated.test_own_class import saved
from tests.families.planted_classes import WIDTH
from tests.support import fake_cuda
from tests.support.on_card import OnCard
from tests.support.planted_comfyui import planted_comfyui

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not sharing_possible(), reason="this system shares no memory with ranks"),
]

MODES = (
    Degrees(pipe=2),
    Degrees(ulysses=2),
    Degrees(batch=2),
    Degrees(patch=2, patch_mode="displaced"),
    Degrees(pipe=2, ulysses=2),
)
KINDS = "input", "output"


@dataclass(frozen=True)
class Controlled:
    """A planted class that adds residuals to the picture's tokens, proven; its file, a call, and what is sent of it."""

    own: OwnClass
    path: Path
    given: Call
    tensors: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def controlled(tmp_path_factory) -> Iterator[Controlled]:
    with planted_comfyui():
        own, given, path, _ = saved("ToPicture", tmp_path_factory.mktemp("model"))
        residuals = for_trial({f"{kind}.1": torch.ones(2, 2 * 4 * 6, WIDTH) for kind in KINDS})
        proof = trial(own, replace(given, named=given.named | {CONTROL: residuals}), (900.0, 1.0), bands=True)
        tensors = to_tensors({**given.named, CONTROL: None}, given.timestep, given.x.shape[1:])
        yield Controlled(replace(own, blocks=proof.blocks, latent=proof.latent), path, given, tensors)


@pytest.fixture(scope="module")
def remote(pools, controlled) -> Callable[..., RemoteTransformer]:
    return functools.partial(pools.load, controlled.path, own=controlled.own)


def nothing() -> None:
    """A Poll that never gives up."""


def maps() -> int:
    """Segments that this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:parallel-dit")


@pytest.fixture
def outputs(controlled) -> Callable[[RemoteTransformer], list[torch.Tensor]]:
    """`outputs(model)`: of calls that differ in their residuals."""

    def call(seed: int) -> ModelCall:
        generator = torch.Generator().manual_seed(seed)
        residuals = {f"{kind}.0": torch.randn(2, 2 * 4 * 6, WIDTH, generator=generator) for kind in KINDS}
        return ModelCall(controlled.given.x, controlled.given.timestep, controlled.tensors, residuals=residuals)

    return lambda model: [model.predict(call(seed), nothing) for seed in range(4)]


@pytest.mark.parametrize("degrees", MODES, ids=str)
def test_results_are_those_over_pipes_though_a_segment_is_written_over_once_it_is_free(
    remote, outputs, degrees, monkeypatch
):
    """As soon as it may be, with what no result could hide."""
    model = remote(degrees, fresh=True)
    sent: list[int] = []
    send = Channel.send

    def counting(channel, message, *rest, **named):
        if isinstance(message, m.Step):
            inside = [any(s.offset_of(t) is not None for s in channel._lent.values()) for t in message.added]
            sent.append(sum(inside))
        return send(channel, message, *rest, **named)

    def done(shared, seq, done=SharedResiduals.done):
        if seq in shared._used:
            shared._used[seq][1].memory.view(torch.float32).fill_(float("nan"))
        done(shared, seq)

    monkeypatch.setattr(Channel, "send", counting)
    monkeypatch.setattr(shared_residuals, "LEAST_BYTES", 1 << 40)
    over_pipes = outputs(model)
    assert not any(sent)
    monkeypatch.setattr(shared_residuals, "LEAST_BYTES", 1)
    monkeypatch.setattr(SharedResiduals, "done", done)
    model._posting._micro_steps._done = model._posting._scatter.shared.done
    shared = outputs(model)
    assert any(sent)
    assert all(map(torch.equal, shared, over_pipes))
    assert not torch.equal(shared[0], shared[1])  # the control: residuals do decide


def test_memory_goes_with_the_model(remote, outputs, monkeypatch):
    monkeypatch.setattr(shared_residuals, "LEAST_BYTES", 1)
    model = remote(Degrees(pipe=2), fresh=True)
    before = maps()
    outputs(model)
    assert maps() > before
    channels = model.pool.ranks.channels
    assert all(channel._lent for channel in channels)
    del model
    remote(Degrees(ulysses=2), fresh=True)
    assert maps() <= before
    assert not any(channel._lent for channel in channels)


class PoolOfNobody:
    """A pool whose ranks take note of what they are lent. `far`: ranks on another machine. `failed`: all is over."""

    def __init__(self, far: tuple[int, ...] = ()):
        self.far, self.lent, self.dropped, self.failed = far, [], [], False
        self.next_segment = itertools.count(1).__next__

    def lends_to(self, rank: int) -> bool:
        return rank not in self.far

    def lend(self, rank: int, segment) -> None:
        if self.failed:
            raise RankError("gone")
        self.lent.append((rank, segment.number))

    def drop(self, rank: int, segment) -> None:
        self.dropped.append((rank, segment.number))

    def forget(self, rank: int, segment) -> None:
        pass


LARGE = torch.ones(1 << 16)


def is_shared(placed: list[torch.Tensor]) -> bool:
    return placed[0].data_ptr() != LARGE.data_ptr()


@pytest.fixture
def pool():
    return PoolOfNobody()


@pytest.fixture
def shared(pool):
    shared = SharedResiduals(Degrees(batch=2, pipe=2), pool)
    yield shared
    shared.close()


def test_a_segment_is_lent_to_its_replicas_ranks_and_used_again(shared, pool):
    assert is_shared(shared.place(1, 5, [LARGE]))
    assert pool.lent == [(2, 1), (3, 1)]
    shared.place(1, 6, [LARGE])  # while the first one is in use
    shared.done(5)
    shared.place(1, 7, [LARGE])
    assert pool.lent == [(2, 1), (3, 1), (2, 2), (3, 2)]
    assert not pool.dropped


def test_a_segment_that_is_too_small_gives_way_to_a_larger_one(shared, pool):
    shared.place(0, 1, [LARGE])
    shared.done(1)
    placed = shared.place(0, 2, [LARGE, LARGE + 1, LARGE[:100]])
    assert pool.dropped == [(0, 1), (1, 1)]
    assert all(map(torch.equal, placed, [LARGE, LARGE + 1, LARGE[:100]]))


def test_what_is_small_or_too_much_goes_over_the_pipes(shared, pool, monkeypatch):
    monkeypatch.setattr(shared_residuals, "MOST_BYTES", 2 * LARGE.nbytes)
    few = [LARGE[:100]]
    assert shared.place(0, 1, few)[0] is few[0]
    assert not pool.lent
    assert [is_shared(shared.place(0, seq, [LARGE])) for seq in (2, 3, 4)] == [True, True, False]
    shared.done(2)
    assert is_shared(shared.place(0, 5, [LARGE]))


def test_without_room_to_spare_it_goes_over_the_pipes(shared, monkeypatch):
    """A process that writes to memory that is not there is killed."""
    monkeypatch.setattr(shared_residuals, "host_memory", lambda: (4 * LARGE.nbytes, None))
    assert is_shared(shared.place(0, 1, [LARGE]))
    assert not is_shared(shared.place(0, 2, [LARGE, LARGE]))


def test_ranks_on_another_machine_are_sent_all():
    shared = SharedResiduals(Degrees(pipe=2), PoolOfNobody(far=(1,)))
    assert not is_shared(shared.place(0, 1, [LARGE]))


def test_without_memory_to_share_it_goes_over_the_pipes_with_a_word(shared, monkeypatch, caplog):
    def none(number: int, nbytes: int):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(shared_residuals, "make_segment", none)
    with caplog.at_level(logging.WARNING):
        assert not is_shared(shared.place(0, 1, [LARGE]))
        assert not is_shared(shared.place(0, 2, [LARGE]))
    assert [record.message for record in caplog.records if "Cannot allocate memory" in record.message] != []
    assert len(caplog.records) == 1


def test_after_the_end_nothing_is_shared_and_nothing_is_left(pool):
    before = maps()
    handles = len(os.listdir("/proc/self/fd"))
    shared = SharedResiduals(Degrees(), pool)
    shared.place(0, 1, [LARGE])
    shared.place(0, 2, [LARGE])
    shared.done(1)
    shared.close()
    shared.done(2)  # an output that was on its way
    assert not is_shared(shared.place(0, 3, [LARGE]))
    assert (maps(), len(os.listdir("/proc/self/fd"))) == (before, handles)


def test_a_pool_that_has_failed_is_lent_nothing_that_stays(shared, pool):
    before = maps(), len(os.listdir("/proc/self/fd"))
    pool.failed = True
    with pytest.raises(RankError, match="gone"):
        shared.place(0, 1, [LARGE])
    assert (maps(), len(os.listdir("/proc/self/fd"))) == before


def test_a_rank_that_is_killed_leaves_no_shared_memory(process_pools, tmp_path, monkeypatch):
    """Neither in this process nor under a name anywhere."""
    monkeypatch.setattr(shared_residuals, "LEAST_BYTES", 1)
    before, names = maps(), set(os.listdir("/dev/shm"))
    case = next(case for case in all_cases() if case.name == "wan-animate-2")
    x, timestep, tensors = case.inputs()
    size = len(x), torch.Size(case.row.patching.grid(tuple(x.shape))).numel(), case.row.sizes.hidden(case.config)
    call = ModelCall(x, timestep, tensors, residuals={"blocks.0": torch.ones(size)})
    model = process_pools.load(case.save(case.model(), tmp_path / "model.safetensors"), Degrees(pipe=2), fresh=True)
    model.predict(call, nothing)
    assert maps() > before
    os.kill(model.pool.pids[1], signal.SIGKILL)
    with pytest.raises(RankError):
        model.predict(call, nothing)
    process_pools.end(2)
    del model
    assert maps() == before
    assert set(os.listdir("/dev/shm")) == names


def test_a_rank_lets_a_segment_go_between_its_messages(remote, controlled, monkeypatch):
    """Not while it computes, when it may be capturing a CUDA graph."""
    let_go, computing, given = [], threading.local(), controlled.given
    step, return_segment = Engine.step, Channel.return_segment

    def marked(*arguments):
        computing.rank = True
        return step(*arguments)

    def noted(channel, number):
        let_go.append(getattr(computing, "rank", False))
        return_segment(channel, number)

    model = remote(Degrees(pipe=2), fresh=True)
    monkeypatch.setattr(Engine, "step", marked)
    monkeypatch.setattr(Channel, "return_segment", noted)
    monkeypatch.setattr(shared_residuals, "LEAST_BYTES", 1)
    for kinds in (KINDS[:1], KINDS):  # the second call needs a larger segment in the place of the first one's
        residuals = {f"{kind}.0": torch.randn(2, 2 * 4 * 6, WIDTH) for kind in kinds}
        model.predict(ModelCall(given.x, given.timestep, controlled.tensors, residuals=residuals), nothing)
    model.close_run(0, nothing)  # the ranks have come so far
    assert let_go
    assert all(let_go)


def test_memory_that_cannot_be_pinned_is_no_error_of_what_the_gpu_does_next(monkeypatch, caplog):
    segment, forgotten = make_segment(1, 4096), []
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:
        cuda.runtime.budget = 4095
        monkeypatch.setattr(pinned, "_forget_error", forgotten.append)
        pinned.pinning(torch.device("cuda", 1))(segment.memory)()
    assert forgotten == [torch.device("cuda", 1)]
    assert "could not be pinned" in caplog.text
    segment.close()


def test_pinned_segments_are_unpinned_before_they_go():
    """Where ranks are on CUDA; the calls, on a stand-in for its runtime."""
    segment = make_segment(1, 4096)
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:
        let_go = pinned.pinning(torch.device("cuda", 1))(segment.memory)
        assert cuda.runtime.locked == {segment.memory.data_ptr(): 4096}
        assert cuda.runtime.devices == [1]
        assert cuda.current_device() == 0  # this thread's own
        let_go()
        assert cuda.waits == 1  # for what still reads it
        assert not cuda.runtime.locked
    segment.close()
    assert pinned.pinning(torch.device("cpu"))(LARGE)() is None


def test_residuals_leave_a_gpu_into_page_locked_memory_and_the_host_waits_once():
    values, copies = [torch.randn(1 << 14) for _ in range(4)], []
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:
        shared = SharedResiduals(Degrees(), PoolOfNobody())
        for seq in range(2):
            placed = shared.place(0, seq, [OnCard.of(each, cuda, copies) for each in values])
            assert all(map(torch.equal, placed, values))
            assert cuda.done[1] == cuda.issued[1] == 4.0 * (seq + 1)
            shared.done(seq)
        assert copies == [(True, True, True)] * 8
        assert cuda.waits == 2
        assert len(cuda.runtime.devices) == 1
        larger = shared.place(0, 2, [OnCard.of(torch.randn(1 << 20), cuda, copies)])
        assert list(cuda.runtime.locked) == [larger[0].data_ptr()]  # the small one has gone
        shared.close()
        assert not cuda.runtime.locked
