"""Micro-steps that are replays of CUDA graphs give the same bits as all others, on emulated cards.

A replay there (tests/support/emulated_gpu/graphs.py) has what makes a CUDA graph go wrong: baked numbers and addresses, and
memory that other graphs write to.
"""

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
from parallel_backend.core.setup import Offload
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.micro_step_graphs import CudaCaptures
from parallel_backend.rank.stage_forward import StageForward
from parallel_backend.wire.sampling import RunStats
from testing import mini
from testing.fake_cuda import HOPPER
from testing.models import nobody, on_ranks
from tests.rank.test_lora import lora
from tests.support.cpu_and_gpu import both_kinds
from tests.support.emulated_gpu.machine import machine

pytestmark = [pytest.mark.threads, pytest.mark.slow]

BANDS = 2
SIGMAS = torch.linspace(1, 0, 7) ** 1.5
"""6 steps. Each is another one's length, or the number by which keys are extrapolated would be the same in all of them."""
CAPTURED, REPLAYED = 2 * BANDS, BANDS
"""Of one conditioning's 5 calls in bands: the first two make what stays, the next two are captured, since keys and values
take turns in two places."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Pool]]:
    """`pools(n)`: ranks on cards of their own."""
    with both_kinds(HOPPER, HOPPER, devices=lambda world: ("cuda:0", "cuda:1")[:world]) as both:
        yield both.gpu


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
    machine.record.forget()
    stats = both(pools(ranks), mini_file, Degrees(pipe=ranks), dtype, extrapolate=extrapolate)
    assert not machine.record.violations
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
    assert counts(model.close_run(0, nobody)) == {(2, 8), (2, 6)}
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
    assert counts(model.close_run(0, nobody)) == {(2, 2)}


# What must not be captured.


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(ulysses=2), Degrees(ring=2)], ids=str)
def test_no_transfer_is_in_a_graph(degrees, pools, mini_file):
    assert counts(sampled(load(pools(2), mini_file, degrees, True))[1]) == {(0, 0)}


def test_what_comes_from_the_host_is_in_no_graph(pools, mini_file):
    """Residuals of a ControlNet are other ones, elsewhere, at each step."""
    tokens = mini.inputs(batch=1)[0].shape[2:].numel() // 4 // BANDS
    residuals = {"input.0": torch.randn(1, tokens, mini.CONFIG["width"], generator=torch.Generator().manual_seed(3))}
    assert counts(both(pools(1), mini_file, Degrees(), warm_up=0, residuals=residuals)) == {(0, 0)}


def test_blocks_that_wait_for_their_weights_are_in_no_graph(pools, mini_file):
    stats = sampled(load(pools(1), mini_file, Degrees(), True, offload=Offload(leave_free=1 << 50)))[1]
    assert all(each.streamed_bytes for each in stats)
    assert counts(stats) == {(0, 0)}


CAPTURE, FORWARD, ATTEND = CudaCaptures.capture, StageForward._forward, torch.nn.functional.scaled_dot_product_attention


def failing(captures, work):
    """The capture does all that the host does in a micro-step, and fails after that."""
    CAPTURE(captures, work)
    raise RuntimeError("the driver says no\nand more")


def elsewhere(*given, **named):
    """Attention is launched on the default stream."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return ATTEND(*given, **named)


def copying(forward, state, inputs):
    """The memory that it is from is another's by the time of the replay."""
    device_copies.to_device(torch.zeros(3), inputs.timestep.device)
    return FORWARD(forward, state, inputs)


ATTENTION = (torch.nn.functional, "scaled_dot_product_attention", elsewhere)
ENDS = {
    "the driver says no": lambda patch: patch.setattr(CudaCaptures, "capture", failing),
    "a replay gave a different output from the micro-step that it repeats": lambda patch: patch.setattr(*ATTENTION),
    "torch SDPA cannot be captured": lambda patch: patch.setitem(KERNELS, "sdpa", replace(KERNELS["sdpa"], graphs=False)),
    "a copy from the host": lambda patch: patch.setattr(StageForward, "_forward", copying),
}


@pytest.mark.parametrize("why", ENDS)
def test_what_ends_the_graphs_costs_a_warning(why, pools, mini_file, monkeypatch, caplog):
    """Once for the model on each rank; the result is right."""
    ENDS[why](monkeypatch)
    with caplog.at_level(logging.WARNING):
        stats = both(pools(2), mini_file, Degrees(pipe=2))
    assert counts(stats) == {(0, 0)}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(
        "cuda_graphs: the model runs without them, because " in each and why in each for each in said
    )
    assert all(why in each.without_graphs for each in stats)


def test_no_other_thread_asks_the_device_anything_during_a_capture(pools, mini_file, monkeypatch):
    """As the heart's thread does every second. On ROCm a question of any thread would make the capture invalid."""
    pool, asking = pools(1), []

    def asked(captures, work):
        def meanwhile():
            asking.append(threading.Thread(target=pool.ranks.workers[0].heartbeat.ask))
            asking[-1].start()
            asking[-1].join(0.05)
            return work()

        return CAPTURE(captures, meanwhile)

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(CudaCaptures, "capture", asked)
    stats = both(pool, mini_file, Degrees())
    assert counts(stats) == {(CAPTURED, REPLAYED)}
    assert len(asking) > CAPTURED
    for thread in asking:
        thread.join(30)
        assert not thread.is_alive()
