"""A GPU that ran out of memory: the next try streams more of the weights by itself, and the next prompt goes by it."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from parallel_backend.client.call import ModelCall
from parallel_backend.client.lost_ranks import FurtherTries
from parallel_backend.client.registry import Registry
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.placement.expected_request import expected_request
from parallel_backend.placement.residency import ALL, offload_of
from parallel_backend.processes import failure_text
from parallel_backend.processes.pool import DeviceFull
from parallel_backend.rank.engine import Engine
from parallel_backend.rank.stage.store.weight_store import WeightStore
from testing import mini
from testing.emulated_device import EmulatedCopies, EmulatedDevice
from testing.models import nobody

pytestmark = [pytest.mark.threads, pytest.mark.slow]

LARGE = EmulatedDevice(100_000_000, 1e9)
"""Holds the model, of 13 MB, and by its estimate any run."""


@pytest.fixture
def registry(thread_pools) -> Iterator[Registry]:
    one = Registry()
    one.start_of = lambda devices: functools.partial(thread_pools.start, device=LARGE)
    yield one
    one.close()


def setup_of(path: Path, offload: str = "auto", ranks: int = 2) -> Setup:
    return mini.setup(path, "fp32", ("cpu",) * ranks, Degrees(pipe=ranks), "sdpa", "even", offload=offload_of(offload))


class Sampling:
    """A run as the nodes make it: the model is asked for before each call."""

    def __init__(self, registry: Registry, setup: Setup):
        self.registry, self.setup = registry, setup
        self.told: list[str] = []
        self.further, self.tries = FurtherTries(self.told.append), 0

    def model(self) -> RemoteTransformer:
        expected = lambda: expected_request(model.checkpoint, (1, 16, 16, 12), 1, 8)  # noqa: E731
        model = self.registry.present()
        return self.registry.model(self.setup, nobody, expected=expected if model is not None else lambda: None)

    def run(self, calls: int = 3) -> list[torch.Tensor]:
        self.registry.begin_run()
        x, timestep, tensors = mini.inputs(batch=1, height=16, width=12)
        return [self._call(ModelCall(x, timestep * (1 - number / 10), tensors)) for number in range(calls)]

    def _call(self, call: ModelCall) -> torch.Tensor:
        while True:
            model, self.tries = self.model(), self.tries + 1
            try:
                return model.predict(call, nobody)
            except DeviceFull as error:
                line = model.learn(error)
                if not self.further.allows(model, functools.partial(str, line)):
                    raise


@pytest.fixture
def runs_out(monkeypatch) -> Callable[..., None]:
    """`runs_out(rank, while_)`: that rank's micro-steps run out of memory as long as `while_(its store)`."""

    def plant(rank: int, while_: Callable[[WeightStore], bool], asked: str = "2.00 MiB") -> None:
        compute = Engine._compute

        def computed(engine, *steps):
            if engine.rank == rank and while_(engine.stage.store):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has 1 GiB.")
            return compute(engine, *steps)

        monkeypatch.setattr(Engine, "_compute", computed)

    return plant


def whole(store: WeightStore) -> bool:
    return not store.streams


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_runs_out_streams_and_ends_by_itself(ranks, registry, mini_file, runs_out, caplog):
    expected = Sampling(registry, setup_of(mini_file, ranks=ranks)).run()
    runs_out(ranks - 1, whole)
    run = Sampling(registry, setup_of(mini_file, ranks=ranks))
    for one, two in zip(run.run(), expected, strict=True):
        assert torch.equal(one, two)
    assert run.tries == len(expected) + 1
    (line,) = run.told
    last = ranks - 1
    assert re.fullmatch(
        rf"cpu ran out of memory\. One more try with new ranks: \d\.\d GB more of rank {last}'s weights "
        "are streamed from host memory",
        line,
    )
    limits = registry.present().resident.limits
    assert limits[last] < ALL
    assert all(limit == ALL for limit in limits[:last])  # the others keep theirs

    # The next prompt, also on new ranks, goes by it.
    registry.unload()
    again = Sampling(registry, setup_of(mini_file, ranks=ranks))
    again.run()
    assert (again.tries, again.told) == (len(expected), [])


def test_a_third_failure_is_an_error_and_the_next_prompt_streams_still_more(registry, mini_file, runs_out, monkeypatch):
    monkeypatch.setattr("parallel_backend.client.memory_guard.LEAST_SHORT", 1)
    setup, kept = setup_of(mini_file, ranks=1), []

    def too_many(store: WeightStore) -> bool:
        kept.append(store.device_bytes)
        return len(kept) <= 3

    runs_out(0, too_many, "1.00 MiB")
    first = Sampling(registry, setup)
    with pytest.raises(DeviceFull, match=r"It would fit with|Use more devices|set offload to"):
        first.run()
    assert (first.tries, len(first.told), len(kept)) == (3, 2, 3)
    following = Sampling(registry, setup)
    following.run()
    assert following.tries == 3
    assert kept[0] > kept[1] > kept[2] > kept[3]


def test_where_nothing_can_be_streamed_the_error_comes_at_once(registry, mini_file, runs_out):
    runs_out(0, lambda store: True)
    run = Sampling(registry, setup_of(mini_file, "none"))
    with pytest.raises(DeviceFull, match="It would fit with "):
        run.run()
    assert (run.tries, run.told) == (1, [])


def test_loading_that_runs_out_is_done_once_more(registry, mini_file, monkeypatch, caplog):
    """The card is fuller than it says."""
    allocate = EmulatedCopies.allocate
    failed = []

    def full(copies, nbytes):
        if copies.rank == 0 and copies.used + nbytes > 6_000_000:
            failed.append(nbytes)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return allocate(copies, nbytes)

    monkeypatch.setattr(EmulatedCopies, "allocate", full)
    shown: list[str] = []
    setup = setup_of(mini_file)
    model = registry.model(setup, nobody, lambda doing, fraction: shown.append(doing))
    assert len(failed) == 1
    assert model.resident.limits[0] < ALL
    assert any("cpu ran out of memory. One more try" in text for text in shown)
    assert "cpu ran out of memory" in caplog.text


@pytest.mark.parametrize(
    ("summary", "full", "asked"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", True, 2684354560),
        ("OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has", True, 20971520),
        ("DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error\nCuda failure 2 'out of memory'", True, 0),
        ("RuntimeError: CUDA error: out of memory", True, 0),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", False, 0),
        ("MemoryError: out of memory", False, 0),
    ],
)
def test_what_is_a_full_device(summary, full, asked):
    assert bool(failure_text.DEVICE_FULL.search(summary)) == full
    assert failure_text.asked(summary) == asked
