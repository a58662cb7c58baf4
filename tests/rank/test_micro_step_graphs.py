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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from parallel_backend.acceptance import tiny_model
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.checkpoints.own_class import open_own_class
from parallel_backend.client.call import ModelCall
from parallel_backend.client.not_finite import NotFiniteError
from parallel_backend.client.pipefusion.band_cut import packed
from parallel_backend.client.pipefusion.banded_run import BandedRun, cut_rows, exact_above
from parallel_backend.client.pipefusion.threads import run_bands
from parallel_backend.client.proven_class import tensors_of
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.client.sampling import Prompt, sample_in_bands
from parallel_backend.core import device_copies
from parallel_backend.core.attention_kernels import KERNELS
from parallel_backend.core.degrees import Degrees
from parallel_backend.families.base.family import Family
from parallel_backend.families.base.patching import latents_of
from parallel_backend.processes.pool import Pool
from parallel_backend.rank import micro_step_graphs
from parallel_backend.rank.attention.kv_buffer import LayerBuffer
from parallel_backend.rank.micro_step_graphs import Kind, MicroStepGraphs, MicroStepInputs
from parallel_backend.rank.stage.module_cache import ModuleCache
from parallel_backend.wire.sampling import RunStats
from testing.cases import all_cases
from testing.cases.case import Case
from testing.emulated_device import EmulatedDevice
from testing.models import on_ranks
from tests.conftest import Pools
from tests.rank.test_lora import lora
from tests.support.recorded_graphs import RecordedCaptures, in_graph

pytestmark = [pytest.mark.threads, pytest.mark.slow]

BANDS = 2
SIGMAS = torch.linspace(1, 0, 7) ** 1.5
"""6 steps. Each is another one's length, or the number by which keys are extrapolated would be the same in all of them."""
CAPTURED, REPLAYED = 2 * BANDS, BANDS
"""Of one conditioning's 5 calls in bands: the first two make what stays, the next two are captured, since keys and values
take turns in two places."""

READS_TIME = ("ltx-2.3",)
"""Cases of which no micro-step can be a graph: they work out on the host what tokens' times are."""


def nobody() -> None:
    pass


def named(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[Case], Path]:
    """A case's model as a file, made once."""
    made: dict[str, Path] = {}

    def file(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = case.save(case.model(), tmp_path_factory.mktemp(case.name) / "model.safetensors")
        return made[case.name]

    return file


@pytest.fixture(scope="module")
def expected(pools, files) -> torch.Tensor:
    """The tiny Flux's sample on one rank, without graphs."""
    case = named("flux-dev")
    return sampled(load(pools(1), files(case), Degrees(), False), case)[0]


@pytest.fixture(autouse=True)
def recorded(monkeypatch, pools) -> Iterator[None]:
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", RecordedCaptures)
    monkeypatch.setattr(device_copies, "in_graph", in_graph)
    yield
    for ranks in (1, 2):
        pools.forget(ranks)


def load(pool: Pool, path: Path, degrees: Degrees, graphs: bool, dtype: str = "fp32", **named) -> RemoteTransformer:
    return on_ranks(pool, open_checkpoint(path), degrees, dtype, "sdpa", nobody, cuda_graphs=graphs, **named)


def sampled(
    model: RemoteTransformer,
    case: Case,
    sigmas: torch.Tensor = SIGMAS,
    extrapolate: bool = True,
    warm_up: int = 1,
    seeds: tuple[int, ...] = (1,),
    heun: bool = False,
    residuals: dict[str, torch.Tensor] | None = None,
    between: Callable[[int], None] = lambda step: None,
) -> tuple[torch.Tensor, list[RunStats]]:
    """PipeFusion in bands along the first latent, and what each rank did.

    `seeds`: of the conditionings that are called in turn. `heun`: each step asks again at its end, where the next begins.
    `between` runs before each step of the first band.
    """
    x, _, _ = case.inputs(batch=1)
    (whole,) = latents_of(x)
    prompts = [case.inputs(batch=1, seed=seed)[2] for seed in seeds]
    rows = cut_rows(tuple(whole.shape), BANDS, case.row.patching)
    run = BandedRun(model, rows, tuple(whole.shape), warm_up > 0, extrapolate=extrapolate)
    limit, dim = exact_above(sigmas, warm_up), case.row.patching.band_dim

    def sample(band: int) -> torch.Tensor:
        def velocity(latent: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            time = sigma.repeat(1) * case.timestep / 0.7
            exact = float(sigma) > limit
            found = [run.predict(band, ModelCall(latent, time, each, residuals=residuals or {}), exact) for each in prompts]
            return sum(found) / len(found)

        latent = whole.narrow(dim, rows[band].start, len(rows[band]))
        for number, (sigma, following) in enumerate(pairwise(sigmas)):
            if band == 0:
                between(number)
            slope = velocity(latent, sigma)
            end = latent + (following - sigma) * slope
            if heun and following > 0:
                end = latent + (following - sigma) * (slope + velocity(end, following)) / 2
            latent = end
        return latent

    parts = run_bands(run, sample, nobody, nobody)
    return torch.cat(parts, dim), model.close_run(run.run, nobody)


def counts(stats: list[RunStats]) -> set[tuple[int, int]]:
    """(captured, replayed), of all ranks alike."""
    return {(each.captured, each.replayed) for each in stats}


def both(pool: Pool, path: Path, case: Case, degrees: Degrees, dtype: str = "fp32", **settings) -> list[RunStats]:
    """A run with and one without graphs, which have to be equal; what the ranks did in the one with them."""
    expected, without = sampled(load(pool, path, degrees, False, dtype), case, **settings)
    found, stats = sampled(load(pool, path, degrees, True, dtype), case, **settings)
    assert expected.isfinite().all()
    assert torch.equal(found, expected)
    assert counts(without) == {(0, 0)}
    assert [each.micro_steps for each in stats] == [each.micro_steps for each in without]
    return stats


@pytest.mark.parametrize(
    ("name", "ranks", "extrapolate", "dtype"),
    [
        ("flux-dev", 1, True, "fp32"),
        ("flux-dev", 2, False, "fp32"),
        ("flux-kontext", 2, True, "bf16"),  # with references keys are not corrected
        ("wan-2.1-t2v", 1, False, "fp32"),
        ("wan-2.1-t2v", 2, True, "bf16"),
    ],
)
def test_a_run_with_graphs_gives_the_same_bits(name, ranks, extrapolate, dtype, pools, files):
    case = named(name)
    stats = both(pools(ranks), files(case), case, Degrees(pipe=ranks), dtype, extrapolate=extrapolate)
    # Without extrapolation buffers stay where they are: one graph for each band, and one call less that makes something.
    assert counts(stats) == {(CAPTURED, REPLAYED) if extrapolate else (BANDS, 2 * BANDS)}


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name) for case in all_cases() if case.sampled and not case.full],
)
def test_every_family_gives_the_same_bits(case, pools, files, caplog):
    x, _, tensors = case.inputs(batch=1)
    found = []
    for graphs in (False, True):
        model = load(pools(2), files(case), Degrees(pipe=2), graphs)
        sigmas, prompt = SIGMAS * case.timestep / 0.7, Prompt(tensors, tensors, 1.0)
        output, stats = sample_in_bands(model, x, sigmas, prompt, BANDS, 1)
        found.append(packed(latents_of(output)))
    assert torch.equal(*found)
    assert counts(stats) == {(0, 0) if case.name in READS_TIME else (CAPTURED, REPLAYED)}
    assert not caplog.records


def test_prompts_in_turn_and_one_run_behind_another(pools, files):
    """Each conditioning has keys, values and graphs of its own; a run's graphs end with it."""
    case, degrees, seeds = named("flux-dev"), Degrees(pipe=2), (1, 2, 3)
    expected = sampled(load(pools(2), files(case), degrees, False), case, seeds=seeds)[0]
    model = load(pools(2), files(case), degrees, True)
    for _ in range(2):
        found, stats = sampled(model, case, seeds=seeds)
        assert torch.equal(found, expected)
        assert counts(stats) == {(len(seeds) * CAPTURED, len(seeds) * REPLAYED)}


@pytest.mark.parametrize("settings", [{"heun": True}, {"warm_up": 0}], ids=str)
def test_calls_at_one_timestep_and_buffers_that_fill_up(settings, pools, files):
    """A second call at a timestep finds the first one's modulation, and extrapolates nothing."""
    case = named("flux-dev")
    stats = both(pools(1), files(case), case, Degrees(), **settings)
    assert all(each.replayed for each in stats)


def whole_calls(model: RemoteTransformer, case: Case, change: Callable[[int], None] = lambda step: None) -> torch.Tensor:
    """Six exact calls outside of runs, whose outputs differ by the timestep alone."""
    x, timestep, tensors = case.inputs()
    outputs = []
    for number in range(6):
        change(number)
        outputs.append(model.predict(ModelCall(x, timestep * (1 - number / 10), tensors), nobody))
    return torch.stack(outputs)


def test_exact_calls_are_replayed_too(pools, files):
    case, degrees = named("flux-dev"), Degrees(pipe=2)
    expected = whole_calls(load(pools(2), files(case), degrees, False), case)
    model = load(pools(2), files(case), degrees, True)
    assert torch.equal(whole_calls(model, case), expected)
    assert counts(model.close_run(0, nobody)) == {(2, 6)}  # a pipeline has each entry apart
    assert len({float(each.sum()) for each in expected}) == len(expected)


def of_a_class(pool: Pool, ranks: int, path: Path) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Six exact calls and a run in bands with and without graphs, which have to be equal; counts of both with them."""
    own = tiny_model.tried(1)
    checkpoint = open_own_class(tiny_model.save(tiny_model.tiny_model(), path), own)
    x, timestep, tensors = tiny_model.call()
    one, _, of_one = tiny_model.call(batch=1, rows=16, columns=12)
    whole, banded = [], []
    for graphs in (False, True):
        settings = {"own_class": own, "cuda_graphs": graphs}
        model = on_ranks(pool, checkpoint, Degrees(pipe=ranks), "fp32", "sdpa", nobody, **settings)
        times = [timestep * (1 - number / 10) for number in range(6)]
        whole.append(torch.stack([model.predict(tiny_model.on_ranks(x, time, tensors), nobody) for time in times]))
        of_whole = counts(model.close_run(0, nobody))
        sample, stats = sample_in_bands(model, one, SIGMAS, Prompt(tensors_of(of_one), {}, 1.0), BANDS, 1)
        banded.append(sample)
    assert torch.equal(*whole) and torch.equal(*banded)
    return of_whole, counts(stats)


@pytest.mark.parametrize(("ranks", "exact"), [(1, {(1, 3)}), (2, {(2, 7), (2, 6)})])
def test_a_class_gives_the_same_bits(ranks, exact, pools, tmp_path):
    """Its forward receives and sends. A later stage learns from the first call what it receives."""
    assert of_a_class(pools(ranks), ranks, tmp_path / "tiny.safetensors") == (exact, {(CAPTURED, REPLAYED)})


def test_a_lora_and_weights_that_move_end_the_graphs(pools, files):
    """Otherwise the replays would compute with what was there before."""
    case, found = named("flux-dev"), []
    for graphs in (False, True):
        model = load(pools(1), files(case), Degrees(), graphs)

        def change(number: int, model=model) -> None:
            if number == 4:
                model.adapt(object(), lora(load_file(files(case))), nobody)

        found.append(whole_calls(model, case, change))
        model.adapt(None, (), nobody)
    assert torch.equal(*found)
    assert counts(model.close_run(0, nobody)) == {(1, 1)}


# What must not be captured.


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(ulysses=2), Degrees(ring=2)], ids=str)
def test_no_transfer_is_in_a_graph(degrees, pools, files):
    case = named("flux-dev")
    assert counts(sampled(load(pools(2), files(case), degrees, True), case)[1]) == {(0, 0)}


def test_what_comes_from_the_host_is_in_no_graph(pools, files):
    """Residuals of a ControlNet are other ones, elsewhere, at each step."""
    case = named("flux-dev")
    x, hidden = case.inputs(batch=1)[0], case.row.sizes.hidden(case.config)
    tokens = torch.Size(case.row.patching.grid(tuple(x.shape))).numel() // BANDS
    residuals = {"transformer_blocks.0": torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(3))}
    assert counts(both(pools(1), files(case), case, Degrees(), warm_up=0, residuals=residuals)) == {(0, 0)}


def test_blocks_that_wait_for_their_weights_are_in_no_graph(thread_pools, files):
    case = named("flux-dev")
    held = files(case).stat().st_size
    pools = Pools(functools.partial(thread_pools.start, device=EmulatedDevice(held * 3 // 4, 1e9)), silence=300)
    try:
        stats = both(pools(1), files(case), case, Degrees())
    finally:
        pools.close()
    assert all(each.streamed_bytes for each in stats)
    assert counts(stats) == {(0, 0)}


def test_a_timestep_that_the_host_works_with_is_in_no_graph(pools, files, caplog):
    case = named("ltx-2.3")
    x, timestep, tensors = case.inputs()
    found = []
    for graphs in (False, True):
        model = load(pools(1), files(case), Degrees(), graphs)
        found += [model.predict(ModelCall(x, timestep * scale, tensors), nobody) for scale in (1.0, 0.9, 0.8, 0.7)]
    assert all(torch.equal(*pair) for pair in zip(packed_all(found[:4]), packed_all(found[4:]), strict=True))
    assert counts(model.close_run(0, nobody)) == {(0, 0)}
    assert not caplog.records  # it was no failure


def packed_all(outputs: list) -> list[torch.Tensor]:
    return [packed(latents_of(output)) for output in outputs]


class Failing(RecordedCaptures):
    """The first capture does all that the host does in a micro-step, and fails after that."""

    def capture(self, work):
        super().capture(work)
        raise RuntimeError("the driver says no\nand more")


class Refusing(RecordedCaptures):
    """The first capture fails at the third operation of attention, when keys of two layers are written."""

    def capture(self, work):
        left = [2]

        def limited():
            with FailsAt("scaled_dot_product", left):
                return work()

        return super().capture(limited)


class FailsAt(TorchDispatchMode):
    def __init__(self, name: str, left: list[int]):
        super().__init__()
        self._name, self._left = name, left

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self._name in str(function):
            if not self._left[0]:
                raise RuntimeError("the driver says no")
            self._left[0] -= 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("captures", [Failing, Refusing])
def test_a_capture_that_fails_costs_a_warning(captures, pools, files, expected, monkeypatch, caplog):
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", captures)
    case = named("flux-dev")
    with caplog.at_level(logging.WARNING):
        found, stats = sampled(load(pools(1), files(case), Degrees(), True), case)
    assert torch.equal(found, expected)
    assert counts(stats) == {(0, 0)}
    (record,) = caplog.records  # once, for the model
    assert record.getMessage().endswith("since a micro-step was not captured: the driver says no")


class Elsewhere(RecordedCaptures):
    """Attention is launched on the default stream."""

    elsewhere = "scaled_dot_product"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("warm_up", [0, 1])
def test_a_kernel_that_no_capture_sees_ends_the_graphs(ranks, warm_up, pools, files, monkeypatch, caplog):
    monkeypatch.setitem(micro_step_graphs.CAPTURES, "cpu", Elsewhere)
    case = named("flux-dev")
    stats = both(pools(ranks), files(case), case, Degrees(pipe=ranks), warm_up=warm_up)
    assert counts(stats) == {(0, 0)}
    assert len(caplog.records) == ranks
    why = "a replay gave another output than the micro-step that it repeats"
    assert all(record.getMessage().endswith(f"the model runs without, since {why}") for record in caplog.records)
    assert {each.without_graphs for each in stats} == {why}


def test_a_kernel_that_cannot_be_captured_is_not_tried(pools, files, monkeypatch, caplog):
    row = replace(KERNELS["sdpa"], graphs=False)
    monkeypatch.setitem(KERNELS, "sdpa", row)
    case = named("flux-dev")
    stats = both(pools(1), files(case), case, Degrees())
    assert counts(stats) == {(0, 0)}
    assert [record.getMessage() for record in caplog.records] == [
        "Parallel DiT: cuda_graphs: the model runs without, since torch SDPA cannot be captured"
    ]
    assert {each.without_graphs for each in stats} == {"torch SDPA cannot be captured"}


def test_which_kernels_can_be_captured():
    assert [name for name, row in KERNELS.items() if not row.graphs] == ["sage"]


def test_several_ranks_on_rocm_capture_nothing(pools, files, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    case = named("flux-dev")
    assert counts(both(pools(2), files(case), case, Degrees(pipe=2))) == {(0, 0)}
    assert counts(both(pools(1), files(case), case, Degrees())) == {(CAPTURED, REPLAYED)}


def test_a_size_is_compared_once_for_the_model_and_again_with_a_lora(pools, files, monkeypatch):
    compared, compare = [], MicroStepGraphs._compare

    def noted(self, state, *arguments):
        compared.append(Kind.of(state.step).size)
        return compare(self, state, *arguments)

    monkeypatch.setattr(MicroStepGraphs, "_compare", noted)
    case = named("flux-dev")
    model = load(pools(1), files(case), Degrees(), True)
    for _ in range(2):
        sampled(model, case, seeds=(1, 2))
        assert len(compared) == len({*compared}) == BANDS
    model.adapt(object(), lora(load_file(files(case))), nobody)
    sampled(model, case)
    assert len(compared) == 2 * BANDS
    model.adapt(None, (), nobody)


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


def test_no_other_thread_asks_the_device_anything_during_a_capture(pools, files, monkeypatch):
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
    case = named("flux-dev")
    stats = both(pools(1), files(case), case, Degrees())
    assert counts(stats) == {(CAPTURED, REPLAYED)}
    assert len(beats) > CAPTURED
    assert {each.doing[:10] for each in beats} == {"micro-step"}
    assert not any(queries)
    hearts[-1].ask()
    assert len(queries) == len(beats)


# Controls: what a graph must not have in it shows.


def baked_timestep(monkeypatch) -> None:
    def copy_from(self, other: MicroStepInputs) -> None:
        for own, theirs in zip((self.x, *self.received), (other.x, *other.received), strict=True):
            if own is not None:
                own.copy_(theirs)

    monkeypatch.setattr(MicroStepInputs, "copy_from", copy_from)


def baked_ratio(monkeypatch) -> None:
    extrapolate, ratios = LayerBuffer.extrapolate, []

    def by_number(self, weight: torch.Tensor) -> None:
        if self.last is None or _get_current_dispatch_mode() is None:
            ratios.append(weight.clone())
            return extrapolate(self, weight)
        return extrapolate(self, ratios[-1])

    monkeypatch.setattr(LayerBuffer, "extrapolate", by_number)


def buffers_that_stay(monkeypatch) -> None:
    monkeypatch.setattr("parallel_backend.rank.attention.kv_buffer.KVBuffer.follow", lambda self, layers: None)


def places_that_do_not_count(monkeypatch) -> None:
    monkeypatch.setattr("parallel_backend.rank.micro_step_graphs.MicroStepState.addresses", lambda self: ())


@pytest.mark.parametrize("fault", [baked_timestep, baked_ratio, buffers_that_stay, places_that_do_not_count])
def test_a_fault_shows(fault, pools, files, expected, monkeypatch):
    case = named("flux-dev")
    fault(monkeypatch)
    found, stats = sampled(load(pools(1), files(case), Degrees(), True), case)
    assert all(each.replayed for each in stats)
    assert not torch.equal(found, expected)


def test_what_is_left_in_the_graphs_memory_shows(pools, files, monkeypatch):
    case = named("flux-dev")
    monkeypatch.setattr(ModuleCache, "_in_its_place", lambda self, key, out: out)
    with pytest.raises(NotFiniteError):
        sampled(load(pools(1), files(case), Degrees(), True), case)


def test_a_copy_from_the_host_is_in_no_graph(pools, files, expected, monkeypatch, caplog):
    """The memory that it is from is another's by the time of the replay."""
    case, run = named("flux-dev"), Family.run

    def copying(self, model, step):
        device_copies.to_device(torch.zeros(3), step.timestep.device)
        return run(self, model, step)

    monkeypatch.setattr(Family, "run", copying)
    found, stats = sampled(load(pools(1), files(case), Degrees(), True), case)
    assert torch.equal(found, expected)
    assert counts(stats) == {(0, 0)}
    assert "a copy from the host" in caplog.text
