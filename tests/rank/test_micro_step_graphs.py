"""Micro-steps that are replays of CUDA graphs give the same bits as all others.

On the CPU a stand-in records what a micro-step asks torch for (tests/support/recorded_graphs.py): a replay has what makes a
CUDA graph go wrong, baked numbers and addresses, and memory that other graphs write to.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_backend.client.call import ModelCall
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core import device_copies
from parallel_backend.core.attention_kernels import KERNELS
from parallel_backend.core.degrees import Degrees
from parallel_backend.own_class.built.built_class import BuiltClass
from parallel_backend.processes.pool import Pool
from parallel_backend.rank import micro_step_graphs
from parallel_backend.rank.micro_step_graphs import MicroStepGraphs
from parallel_backend.wire.sampling import RunStats
from testing import mini
from testing.emulated_device import EmulatedDevice
from testing.models import on_ranks
from tests.rank.test_lora import lora
from tests.support.pools import Pools
from tests.support.recorded_graphs import RecordedCaptures, in_graph

pytestmark = [pytest.mark.threads, pytest.mark.slow]

BANDS = 2
SIGMAS = torch.linspace(1, 0, 7) ** 1.5
"""6 steps. Each is another one's length, or the number by which keys are extrapolated would be the same in all of them."""
CAPTURED, REPLAYED = 2 * BANDS, BANDS
"""Of one conditioning's 5 calls in bands: the first two make what stays, the next two are captured, since keys and values
take turns in two places."""


def nobody() -> None:
    pass


@pytest.fixture(scope="module")
def expected(pools, mini_file) -> torch.Tensor:
    """The sample on one rank, without graphs."""
    return sampled(load(pools(1), mini_file, Degrees(), False))[0]


@pytest.fixture(autouse=True)
def recorded(monkeypatch, pools) -> Iterator[None]:
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", RecordedCaptures)
    monkeypatch.setattr(device_copies, "in_graph", in_graph)
    yield
    for ranks in (1, 2):
        pools.forget(ranks)


def load(
    pool: Pool, path: Path, degrees: Degrees, graphs: bool, dtype: str = "fp32", attention: str = "sdpa", **named
) -> RemoteTransformer:
    return on_ranks(pool, mini.opened(path), degrees, dtype, attention, nobody, cuda_graphs=graphs, **named)


def sampled(
    model: RemoteTransformer,
    extrapolate: bool = True,
    warm_up: int = 1,
    seeds: tuple[int, ...] = (1,),
    residuals: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[RunStats]]:
    """PipeFusion in bands along the first latent, and what each rank did.

    `seeds`: of the conditionings that are called in turn.
    """
    whole, patching = mini.inputs(batch=1)[0], model.built.patching
    prompts = [mini.inputs(batch=1, seed=seed)[2] for seed in seeds]
    rows = cut_rows(tuple(whole.shape), BANDS, patching)
    run = BandedRun(model, rows, tuple(whole.shape), warm_up > 0, extrapolate=extrapolate)
    limit, dim = exact_above(SIGMAS, warm_up), patching.band_dim

    def sample(band: int) -> torch.Tensor:
        def velocity(latent: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            time = sigma.repeat(1)
            exact = float(sigma) > limit
            found = [run.predict(band, ModelCall(latent, time, each, residuals=residuals or {}), exact) for each in prompts]
            return sum(found) / len(found)

        latent = whole.narrow(dim, rows[band].start, len(rows[band]))
        for sigma, following in pairwise(SIGMAS):
            latent = latent + (following - sigma) * velocity(latent, sigma)
        return latent

    parts = run_bands(run, sample, nobody, nobody)
    return torch.cat(parts, dim), model.close_run(run.run, nobody)


def counts(stats: list[RunStats]) -> set[tuple[int, int]]:
    """(captured, replayed), of all ranks alike."""
    return {(each.captured, each.replayed) for each in stats}


def both(
    pool: Pool, path: Path, degrees: Degrees, dtype: str = "fp32", attention: str = "sdpa", **settings
) -> list[RunStats]:
    """A run with and one without graphs, which have to be equal; what the ranks did in the one with them."""
    expected, without = sampled(load(pool, path, degrees, False, dtype, attention), **settings)
    found, stats = sampled(load(pool, path, degrees, True, dtype, attention), **settings)
    assert expected.isfinite().all()
    assert torch.equal(found, expected)
    assert counts(without) == {(0, 0)}
    assert [each.micro_steps for each in stats] == [each.micro_steps for each in without]
    return stats


@pytest.mark.parametrize(("ranks", "extrapolate", "dtype"), [(1, True, "fp32"), (2, False, "fp32"), (2, True, "bf16")])
def test_a_run_with_graphs_gives_the_same_bits(ranks, extrapolate, dtype, pools, mini_file):
    stats = both(pools(ranks), mini_file, Degrees(pipe=ranks), dtype, extrapolate=extrapolate)
    # Without extrapolation buffers stay where they are: one graph for each band, and one call less that makes something.
    assert counts(stats) == {(CAPTURED, REPLAYED) if extrapolate else (BANDS, 2 * BANDS)}


def test_prompts_in_turn_and_one_run_behind_another(pools, mini_file):
    """Each conditioning has keys, values and graphs of its own; a run's graphs end with it."""
    degrees, seeds = Degrees(pipe=2), (1, 2, 3)
    expected = sampled(load(pools(2), mini_file, degrees, False), seeds=seeds)[0]
    model = load(pools(2), mini_file, degrees, True)
    for _ in range(2):
        found, stats = sampled(model, seeds=seeds)
        assert torch.equal(found, expected)
        assert {each.captured for each in stats} == {len(seeds) * CAPTURED}
        assert all(each.replayed >= len(seeds) * REPLAYED for each in stats)


def whole_calls(model: RemoteTransformer, change: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    """Six exact calls outside of runs, whose outputs differ by the timestep alone."""
    x, timestep, tensors = mini.inputs()
    outputs = []
    for number in range(6):
        change(number)
        outputs.append(model.predict(ModelCall(x, timestep * (1 - number / 10), tensors), nobody))
    return torch.stack(outputs)


def test_exact_calls_are_replayed_too(pools, mini_file):
    degrees = Degrees(pipe=2)
    expected = whole_calls(load(pools(2), mini_file, degrees, False))
    model = load(pools(2), mini_file, degrees, True)
    assert torch.equal(whole_calls(model), expected)
    # A pipeline has each entry apart. A later stage learns from the first call what it receives.
    assert counts(model.close_run(0, nobody)) == {(2, 7), (2, 6)}
    assert len({float(each.sum()) for each in expected}) == len(expected)


def test_a_lora_and_weights_that_move_end_the_graphs(pools, mini_file):
    """Otherwise the replays would compute with what was there before."""
    found = []
    for graphs in (False, True):
        model = load(pools(1), mini_file, Degrees(), graphs)

        def change(number: int, model=model) -> None:
            if number == 4:
                model.adapt(object(), lora(load_file(mini_file)), nobody)

        found.append(whole_calls(model, change))
        model.adapt(None, (), nobody)
    assert torch.equal(*found)
    assert counts(model.close_run(0, nobody)) == {(2, 1)}


# What must not be captured.


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(ulysses=2), Degrees(ring=2)], ids=str)
def test_no_transfer_is_in_a_graph(degrees, pools, mini_file):
    assert counts(sampled(load(pools(2), mini_file, degrees, True))[1]) == {(0, 0)}


def test_what_comes_from_the_host_is_in_no_graph(pools, mini_file):
    """Residuals of a ControlNet are other ones, elsewhere, at each step."""
    tokens = mini.inputs(batch=1)[0].shape[2:].numel() // 4 // BANDS
    residuals = {"input.0": torch.randn(1, tokens, mini.CONFIG["width"], generator=torch.Generator().manual_seed(3))}
    assert counts(both(pools(1), mini_file, Degrees(), warm_up=0, residuals=residuals)) == {(0, 0)}


def test_blocks_that_wait_for_their_weights_are_in_no_graph(thread_pools, mini_file):
    held = mini_file.stat().st_size
    pools = Pools(functools.partial(thread_pools.start, device=EmulatedDevice(held * 3 // 4, 1e9)), silence=300)
    try:
        stats = both(pools(1), mini_file, Degrees())
    finally:
        pools.close()
    assert all(each.streamed_bytes for each in stats)
    assert counts(stats) == {(0, 0)}


class Failing(RecordedCaptures):
    """The first capture does all that the host does in a micro-step, and fails after that."""

    def capture(self, work):
        super().capture(work)
        raise RuntimeError("the driver says no\nand more")


def test_a_capture_that_fails_costs_a_warning(pools, mini_file, expected, monkeypatch, caplog):
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", Failing)
    with caplog.at_level(logging.WARNING):
        found, stats = sampled(load(pools(1), mini_file, Degrees(), True))
    assert torch.equal(found, expected)
    assert counts(stats) == {(0, 0)}
    (record,) = caplog.records  # once, for the model
    assert record.getMessage().endswith("because a micro-step was not captured: the driver says no")


class Elsewhere(RecordedCaptures):
    """Attention is launched on the default stream."""

    elsewhere = "scaled_dot_product"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kernel_that_no_capture_sees_ends_the_graphs(ranks, pools, mini_file, monkeypatch, caplog):
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", Elsewhere)
    stats = both(pools(ranks), mini_file, Degrees(pipe=ranks))
    assert counts(stats) == {(0, 0)}
    assert len(caplog.records) == ranks
    why = "a replay gave another output than the micro-step that it repeats"
    assert all(record.getMessage().endswith(f"the model runs without, because {why}") for record in caplog.records)
    assert {each.without_graphs for each in stats} == {why}


def test_a_kernel_that_cannot_be_captured_is_not_tried(pools, mini_file, monkeypatch, caplog):
    row = replace(KERNELS["sdpa"], graphs=False)
    monkeypatch.setitem(KERNELS, "sdpa", row)
    stats = both(pools(1), mini_file, Degrees())
    assert counts(stats) == {(0, 0)}
    assert [record.getMessage() for record in caplog.records] == [
        "Parallel DiT: cuda_graphs: the model runs without, because torch SDPA cannot be captured"
    ]
    assert {each.without_graphs for each in stats} == {"torch SDPA cannot be captured"}


class Asking(RecordedCaptures):
    """In the middle of each capture another thread has the rank's heart beat, as it does every second."""

    beats: list[Callable[[], None]]

    def capture(self, work):
        def asked() -> torch.Tensor:
            output = work()
            for beat in self.beats:
                thread = threading.Thread(target=beat)
                thread.start()
                thread.join()
            return output

        return super().capture(asked)


def test_no_other_thread_asks_the_device_anything_during_a_capture(pools, mini_file, monkeypatch):
    """On ROCm a query of an event would make the capture invalid. The beats go on, and the marks are asked afterwards."""
    hearts, queries, beats = [], [], []
    init = MicroStepGraphs.__init__

    def noted(self, device, block_done, alone, *arguments):
        hearts.append(alone.__self__)
        init(self, device, block_done, alone, *arguments)

    def query() -> bool:
        queries.append(capturing[0])
        if capturing[0]:
            raise RuntimeError("HIP error: operation not permitted when stream is capturing")
        return True

    def beat() -> None:
        hearts[-1].mark(query)
        capturing[0] = True
        beats.append(hearts[-1].beat(0))
        capturing[0] = False

    capturing = [False]
    monkeypatch.setattr(MicroStepGraphs, "__init__", noted)
    monkeypatch.setattr(Asking, "beats", [beat], raising=False)
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", Asking)
    stats = both(pools(1), mini_file, Degrees())
    assert counts(stats) == {(CAPTURED, REPLAYED)}
    assert len(beats) > CAPTURED
    assert {each.doing[:10] for each in beats} == {"micro-step"}
    assert not any(queries)
    hearts[-1].ask()
    assert len(queries) == len(beats)


def test_a_copy_from_the_host_is_in_no_graph(pools, mini_file, expected, monkeypatch, caplog):
    """The memory that it is from is another's by the time of the replay."""
    run = BuiltClass.run

    def copying(self, model, step):
        device_copies.to_device(torch.zeros(3), step.timestep.device)
        return run(self, model, step)

    monkeypatch.setattr(BuiltClass, "run", copying)
    found, stats = sampled(load(pools(1), mini_file, Degrees(), True))
    assert torch.equal(found, expected)
    assert counts(stats) == {(0, 0)}
    assert "a copy from the host" in caplog.text
