"""A ControlNet's residuals in shared memory: results are those over pipes, bit for bit; it is bounded; it leaves nothing."""

import functools
import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel_backend.client import shared_residuals
from parallel_backend.client.call import ModelCall
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.shared_residuals import SharedResiduals
from parallel_backend.core import pinned
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.calls.call_arguments import to_tensors
from parallel_backend.own_class.calls.residuals import CONTROL, for_trial
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.trials.trial import trial
from parallel_backend.processes.pool import RankError
from parallel_backend.wire import messages as m
from parallel_backend.wire.channel import Channel
from parallel_backend.wire.shared_memory import make_segment, sharing_possible
from testing import fake_cuda
from testing.models import nobody
from tests.emulated.test_own_class import saved
from tests.own_class.planted_classes import WIDTH
from tests.support.planted_comfyui import as_folder, planted_comfyui

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

    return lambda model: [model.predict(call(seed), nobody) for seed in range(4)]


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


LARGE = torch.ones(1 << 16)


def is_shared(placed: list[torch.Tensor]) -> bool:
    return placed[0].data_ptr() != LARGE.data_ptr()


@pytest.fixture
def pool() -> mock.Mock:
    """A pool whose ranks take note of what they are lent."""
    return mock.Mock(next_segment=itertools.count(1).__next__)


@pytest.fixture
def shared(pool):
    shared = SharedResiduals(Degrees(batch=2, pipe=2), pool)
    yield shared
    shared.close()


def test_a_segment_is_lent_to_its_replicas_ranks_and_used_again(shared, pool):
    assert is_shared(shared.place(1, 5, [LARGE]))
    shared.place(1, 6, [LARGE])  # while the first one is in use
    shared.done(5)
    shared.place(1, 7, [LARGE])
    lent = [(rank, segment.number) for (rank, segment), _ in pool.lend.call_args_list]
    assert lent == [(2, 1), (3, 1), (2, 2), (3, 2)]
    assert not pool.drop.called


def test_what_is_small_or_too_much_goes_over_the_pipes(shared, pool, monkeypatch):
    monkeypatch.setattr(shared_residuals, "MOST_BYTES", 2 * LARGE.nbytes)
    few = [LARGE[:100]]
    assert shared.place(0, 1, few)[0] is few[0]
    assert not pool.lend.called
    assert [is_shared(shared.place(0, seq, [LARGE])) for seq in (2, 3, 4)] == [True, True, False]
    shared.done(2)
    assert is_shared(shared.place(0, 5, [LARGE]))


def test_without_room_to_spare_it_goes_over_the_pipes(shared, monkeypatch):
    """A process that writes to memory that is not there is killed."""
    monkeypatch.setattr(shared_residuals, "host_memory", lambda: (4 * LARGE.nbytes, None))
    assert is_shared(shared.place(0, 1, [LARGE]))
    assert not is_shared(shared.place(0, 2, [LARGE, LARGE]))


def test_a_rank_that_is_killed_leaves_no_shared_memory(process_pools, controlled, monkeypatch, tmp_path):
    """Neither in this process nor under a name anywhere."""
    monkeypatch.setattr(shared_residuals, "LEAST_BYTES", 1)
    before, names = maps(), set(os.listdir("/dev/shm"))
    given, residuals = controlled.given, {f"{kind}.0": torch.ones(2, 2 * 4 * 6, WIDTH) for kind in KINDS}
    call = ModelCall(given.x, given.timestep, controlled.tensors, residuals=residuals)
    own = replace(controlled.own, folder=as_folder(controlled.own.module, tmp_path))
    model = process_pools.load(controlled.path, Degrees(pipe=2), own, fresh=True)
    model.predict(call, nobody)
    assert maps() > before
    os.kill(model.pool.whole.ranks.pids[1], signal.SIGKILL)
    with pytest.raises(RankError):
        model.predict(call, nobody)
    process_pools.end(2)
    del model
    assert maps() == before
    assert set(os.listdir("/dev/shm")) == names


def test_pinned_segments_are_unpinned_before_they_go():
    """Where ranks are on CUDA; the calls, on a stand-in for its runtime."""
    segment = make_segment(1, 4096)
    with fake_cuda.fake_cuda(fake_cuda.ADA, fake_cuda.ADA) as cuda:
        let_go = pinned.pin(segment.memory, torch.device("cuda", 1))
        assert cuda.runtime.locked == {segment.memory.data_ptr(): 4096}
        assert cuda.runtime.devices == [1]
        assert cuda.current_device() == 0  # this thread's own
        let_go()
        assert cuda.waits == 1  # for what still reads it
        assert not cuda.runtime.locked
    segment.close()
    assert pinned.pin(LARGE, torch.device("cpu")) is None
