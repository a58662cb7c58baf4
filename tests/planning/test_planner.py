"""The planner: its cost model against formulas and published runs, calibrations and their files, and what it chooses."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.predictions.presets import MODELS
from benchmarks.predictions.published import RUNS, Run, predicted
from parallel_backend.client.registry import Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Offload, Setup
from parallel_backend.own_class.built.built_class import pairs_of
from parallel_backend.placement.gpu_overheads import context_bytes
from parallel_backend.placement.links import SIZES, Link, Links, alike, links_of
from parallel_backend.placement.memory_model import KV_COPIES, USABLE_MEMORY
from parallel_backend.placement.pipeline_model import StageCost, finish_times
from parallel_backend.planning import planner, prediction
from parallel_backend.planning.calibrated_costs import (
    LEAST_GROWTH,
    BlockCost,
    CalibratedCosts,
    Calibration,
    DeviceCost,
    StepKind,
    through,
)
from parallel_backend.planning.calibration import calibration_of, keep, lasting, load
from parallel_backend.planning.machine import Device, Machine
from parallel_backend.planning.modes import Mode, possible
from parallel_backend.planning.planner import Plan, choose
from parallel_backend.planning.prediction import Prediction, cut_model
from parallel_backend.planning.workload import Workload
from parallel_backend.wire.diagnosis import DeviceMemoryReport, Probed
from parallel_backend.wire.messages import LinksProbed
from testing import mini

pytestmark = pytest.mark.threads

WITHIN = 0.25
GB = 10**9
NOTHING = BlockCost(0.0, 0.0, 0.0)
ENDLESS = Link(0.0, 1e18)
FLUX = MODELS["flux-dev"]
LAYERS, HIDDEN = FLUX.layers, FLUX.hidden


def workload(steps: int = 28, warm_up: int = 1, text: int = 0, prompts: int = 1) -> Workload:
    """Flux-dev at 1024 x 1024."""
    return replace(FLUX, text=text, prompts=prompts).workload("flux", 1024, 1024, steps, warm_up)


def devices(
    count: int, link: Link = ENDLESS, speeds: tuple[float, ...] = (), memory: int | None = None, fixed: float = 0.0
) -> Calibration:
    block = BlockCost(fixed, 2e-6, pairs_of(HIDDEN))
    costs = [
        DeviceCost({"blocks": replace(block, token=block.token / speed)}, NOTHING) for speed in speeds or (1.0,) * count
    ]
    made = tuple(Device(f"cuda:{index}", "made up", memory) for index in range(count))
    return Calibration(Machine(made, Links(alike(count, link))), tuple(costs))


def linked(on: Calibration, links: Links) -> Calibration:
    return replace(on, machine=replace(on.machine, links=links))


def of_mode(found: Plan, mode: Mode) -> Prediction:
    return next(each for each in found.predictions if each.mode == mode)


def predict(on: Calibration, what: Workload, mode: Mode) -> Prediction:
    return prediction.predict(CalibratedCosts(on, what), mode)


def plan(on: Calibration, what: Workload, counts=None) -> Plan:
    return planner.plan(CalibratedCosts(on, what), counts)


def block_seconds(what: Workload) -> float:
    return devices(1).costs[0].blocks["blocks"].whole(what.tokens)


def seconds(on: Calibration, what: Workload, mode: Mode) -> float:
    return predict(on, what, mode).seconds


# Published runs.


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_published_runs_are_predicted(run: Run):
    assert predicted(run) == pytest.approx(run.seconds, rel=WITHIN)


# The formulas. A: bytes of the hidden states; L layers; N ranks; B bandwidth.

N, B, LATENCY = 4, 10e9, 1e-4
A = 4096 * HIDDEN * 2


def test_memory_is_that_of_the_field():
    on, what = devices(N), workload()
    piped = predict(on, what, Mode(Degrees(pipe=N), N)).memory
    assert sum(memory.buffers for memory in piped) / KV_COPIES / GB == pytest.approx(2.9, abs=0.05)
    around = (N - 1) * what.sizes.ends  # each stage has what is around the blocks
    assert sum(memory.weights for memory in piped) == what.sizes.weight_bytes + around
    displaced = predict(on, what, Mode(Degrees(patch=N, patch_mode="displaced"))).memory
    assert displaced[0].buffers == sum(memory.buffers for memory in piped)
    assert displaced[0].weights == what.sizes.weight_bytes
    assert predict(on, what, Mode(Degrees(ulysses=N))).memory[0].buffers == 0
    all_exact = predict(on, workload(warm_up=28), Mode(Degrees(pipe=N), N)).memory  # no run, so nothing is kept
    assert all(memory.buffers == 0 for memory in all_exact)


def test_ulysses_by_the_formula():
    what, on = workload(), devices(N, Link(LATENCY, B))
    t1 = LAYERS * block_seconds(what)
    expected = t1 / N + 4 * A * LAYERS / N * (N - 1) / (N * B) + 2 * LAYERS * LATENCY
    assert seconds(on, what, Mode(Degrees(ulysses=N))) == pytest.approx(28 * expected)


@pytest.mark.parametrize(("stages", "bands"), [(2, 2), (2, 4), (3, 3), (3, 6), (19, 19), (19, 38)])
@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_pipefusion_by_the_formula_and_by_the_schedule(stages, bands, warm_up):
    """Stages that are equal (57 = 3 x 19), or nearly, as slow as the slowest one counts; 228 rows, which all bands share."""
    what, on = replace(FLUX, text=0).workload("flux", 228 * 16, 256, 28, warm_up), devices(stages)
    mode = Mode(Degrees(pipe=stages), bands)
    model = CalibratedCosts(on, what)
    cut = cut_model(model, mode)
    band = model.step(mode, StepKind.OTHER_BAND, cut)
    tau = max(len(span) * band.blocks["blocks.0"][stage] for stage, span in enumerate(cut.stage_blocks))
    t1 = LAYERS * block_seconds(what)
    assert tau == pytest.approx(math.ceil(LAYERS / stages) * block_seconds(what) / bands)
    formula = warm_up * t1 + ((28 - warm_up) * max(bands, stages) + stages - 1) * tau
    found = seconds(on, what, mode)
    if LAYERS % stages == 0:
        assert found == pytest.approx(formula)
    assert formula * (1 - 1 / 28) <= found <= formula * (1 + 1e-9)
    costs = [StageCost(0.0, len(span) * block_seconds(what)) for span in cut.stage_blocks]
    assert found == pytest.approx(finish_times([step < warm_up for step in range(28)], bands, costs)[-1])


def test_split_batch_and_displaced_by_hand():
    what, on = workload(prompts=2), devices(2, Link(0.0, B))
    t1 = LAYERS * block_seconds(what)
    assert seconds(on, what, Mode(Degrees(batch=2))) == pytest.approx(28 * t1)
    assert seconds(on, what, Mode(Degrees(), device=1)) == pytest.approx(28 * 2 * t1)
    displaced, alone = Mode(Degrees(patch=2, patch_mode="displaced")), workload()
    waits = 2 * A * LAYERS / 2 / B
    assert seconds(on, alone, displaced) == pytest.approx(28 * t1 / 2 + waits)  # only the warm-up waits
    crawl = devices(2, Link(0.0, B / 1000))
    assert seconds(crawl, alone, displaced) == pytest.approx(t1 / 2 + 28 * 1000 * waits)


# Links.


def test_links_that_disturb_each_other_are_measured_so():
    times = tuple((size, 1e-5 + size / 5e9) for size in SIZES)
    quiet = max(SIZES) / 5e9 + 1e-5

    def found(together: float) -> list[LinksProbed]:
        return [LinksProbed(0, "", None, None, {1: times}, together), LinksProbed(1, "", None, None, {}, together)]

    assert links_of(found(quiet)).crowding == pytest.approx(1.0)
    crowded = links_of(found(3 * quiet))
    assert crowded.crowding == pytest.approx(3.0)
    assert crowded.link(1, 0).bandwidth == pytest.approx(5e9 / 3)
    assert links_of(found(0.0)).crowding == 1.0
    assert links_of([LinksProbed(0, "", None, None, {})]) == Links({})


# Properties.

worlds = st.sampled_from([2, 3, 4, 8])
links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e8, 1e12))


def small(prompts: int, text: int, warm_up: int) -> Workload:
    """Few layers and steps, so that many examples are tried."""
    model = replace(FLUX, layers=10, text=text, prompts=prompts)
    return model.workload("small", 512, 512, 5, warm_up)


workloads = st.builds(small, st.sampled_from([1, 2]), st.sampled_from([0, 300]), st.integers(0, 5))


@settings(max_examples=20)
@given(worlds, workloads, links, st.lists(st.floats(0.2, 5), min_size=8, max_size=8))
def test_every_candidate_uses_all_devices_and_holds_no_more_than_the_model(world, what, link, speeds):
    on = devices(world, link, tuple(speeds[:world]))
    found = plan(on, what)
    candidates, refused = possible(what, world)
    assert {each.mode for each in found.predictions if each.mode.device is None} == set(candidates)
    assert found.refused == refused
    assert [each.seconds for each in found.predictions] == sorted(each.seconds for each in found.predictions)
    for each in found.predictions:
        ranks = each.mode.degrees.world
        assert ranks == (world if each.mode.device is None else 1)
        assert len(each.memory) == ranks
        assert all(0 < memory.weights <= what.sizes.weight_bytes for memory in each.memory)
        held = sum(memory.weights for memory in each.memory)
        assert held >= what.sizes.weight_bytes * 0.999  # nothing of it is nowhere


@given(st.floats(0, 1e-3), st.floats(1e-9, 1e-3), st.sampled_from([0.0, 1e-5, 1e-4]))
def test_a_block_is_found_from_two_lengths(fixed, token, pairs):
    cost = BlockCost(fixed, token, pairs)
    found = through([(tokens, cost.fixed + cost.work(tokens, tokens)) for tokens in (1088, 320)], pairs)
    if (work := cost.work(1088, 1088)) > LEAST_GROWTH * (fixed + work):
        assert (found.fixed, found.token) == pytest.approx((fixed, token), rel=1e-4, abs=1e-9)


# What is chosen.


def test_slow_links_want_pipefusion_and_fast_ones_what_is_exact():
    what = workload(text=512)
    slow = plan(devices(4, Link(1e-5, 1e9)), what)
    assert slow.best.mode.degrees == Degrees(pipe=4)
    assert planner.advise([each for each in slow.predictions if each.mode.exact]).mode.device is not None
    fast = plan(devices(4, Link(1e-5, 300e9)), what)
    assert fast.best.mode.exact
    assert fast.best.seconds < fast.one_device.seconds / 3


def exact(found: Plan) -> Plan:
    """The same as it is planned where no PipeFusion is applied."""
    costs = found.costs
    return plan(costs.calibration, replace(costs.workload, warm_up=costs.workload.steps), range(1, 5))


def test_auto_takes_pipefusion_only_where_it_is_applied():
    with_it = plan(devices(4, Link(1e-5, 1e9)), workload(text=512), range(1, 5))
    assert choose(with_it).mode.degrees == Degrees(pipe=4)
    assert choose(exact(with_it)).mode.device == 0  # a pipeline of whole calls is no faster than one device
    tight = plan(devices(4, Link(1e-5, 1e9), memory=12 * GB), workload(text=512), range(1, 5))
    chosen = choose(exact(tight))
    assert not chosen.lacks
    assert chosen.mode.degrees.pipe > 1  # but where one device does not hold the model it is what there is
    assert choose(exact(tight)).seconds >= with_it.one_device.seconds


@pytest.mark.parametrize(("ranks", "warm_up", "taken"), [(2, 1, True), (4, 1, False), (2, 28, False)])
def test_auto_takes_displaced_patches_of_two_ranks_and_only_where_the_sampler_pipelines(ranks, warm_up, taken):
    found = plan(devices(ranks, Link(1e-5, 2e9)), workload(text=512, warm_up=warm_up))
    displaced = of_mode(found, Mode(Degrees(patch=ranks, patch_mode="displaced")))
    cheap = replace(found, predictions=(replace(displaced, seconds=0.001), *found.predictions))
    assert cheap.best.mode.degrees.patch == ranks
    assert (choose(cheap).mode.degrees.patch == ranks) is taken


def test_auto_leaves_devices_out_that_only_slow_it_down():
    """Two that are linked well, and two more that are not."""
    on = devices(4, Link(1e-5, 300e9))
    apart = {pair: link if max(pair) < 2 else Link(1e-2, 1e7) for pair, link in on.machine.links.between.items()}
    found = choose(plan(linked(on, Links(apart)), workload(warm_up=28), range(1, 5)))
    assert found.mode.degrees.world == 2


def test_where_nothing_fits_auto_takes_what_needs_least():
    found = choose(plan(devices(4, memory=GB), workload(), range(1, 5)))
    assert found.lacks
    assert found.mode.degrees.world == 4
    assert max(memory.weights for memory in found.memory) < 0.3 * workload().sizes.weight_bytes


# Weights that are streamed.


def streaming(count: int, memory: int, copies: float = 25e9, link: Link = ENDLESS) -> Calibration:
    on = devices(count, link, memory=memory)
    return replace(on, machine=replace(on.machine, devices=tuple(replace(one, copies=copies) for one in on.machine.devices)))


def test_what_does_not_fit_is_streamed_and_costs_its_copies():
    """Traffic of a step, by mode: W - B under Ulysses, W / T - B under tensor, M (W / N - B) under PipeFusion."""
    on, what = streaming(2, 10 * GB, copies=1e9), workload(text=512)  # copies are much slower than computing
    weights, steps = what.sizes.weight_bytes, what.steps
    for degrees, bands in ((Degrees(ulysses=2), 1), (Degrees(tensor=2), 1), (Degrees(pipe=2), 2), (Degrees(pipe=2), 4)):
        found = predict(on, what, Mode(degrees, bands))
        assert not found.lacks
        assert 9 * GB < found.most_memory <= USABLE_MEMORY * 10 * GB
        assert found.most_streamed > weights / (degrees.pipe * degrees.tensor) - USABLE_MEMORY * 10 * GB
        exact = what.warm_up_steps if degrees.pipe > 1 else steps  # a step of its own each, with one pass of the weights
        expected = (exact + bands * (steps - exact)) * found.most_streamed / 1e9
        assert found.seconds == pytest.approx(expected, rel=0.05)


def test_copies_that_hide_cost_nothing_and_none_are_made_where_all_fits():
    what = workload(text=512)
    all_fit, fast = (predict(streaming(2, memory, 1e15), what, Mode(Degrees(ulysses=2))) for memory in (80 * GB, 10 * GB))
    assert all_fit.most_streamed == 0 < fast.most_streamed
    assert fast.seconds == pytest.approx(all_fit.seconds, rel=0.01)
    refused = prediction.predict(
        CalibratedCosts(streaming(2, 10 * GB), what), Mode(Degrees(ulysses=2)), Offload(streams=False)
    )
    assert "which has 10.0 GB free" in refused.lacks
    left = prediction.predict(
        CalibratedCosts(streaming(2, 10 * GB), what), Mode(Degrees(ulysses=2)), Offload(leave_free=2 * GB)
    )
    assert left.most_memory <= USABLE_MEMORY * 8 * GB


# Calibrations.


def test_a_gpu_keeps_some_memory_for_its_processes(mini_file):
    file = mini.opened(mini_file, text=8)
    times = dict.fromkeys(file.built.counts, (2e-3, 1e-3))
    found = [LinksProbed(0, "a GPU", 9 * GB, 24 * GB, {})]
    memories = [DeviceMemoryReport(0, "a card", 9 * GB, 0, 0, 24 * GB, "here", 64 * GB, 25e9)]
    made = calibration_of(
        ("cuda:0",), file, found, memories, [Probed(0, times, (1e-3, 1e-3), 9 * GB)], (64 * 32 + 64, 16 * 32 + 64)
    )
    assert made.machine.devices == (Device("cuda:0", "a GPU", 9 * GB, 24 * GB, 25e9),)
    assert lasting(made).machine.devices == (Device("cuda:0", "a GPU", 24 * GB - 2 * context_bytes("cuda:0"), None, 25e9),)
    assert set(made.costs[0].blocks) == set(times)


KEY = {"version": 1, "devices": [["cuda:0", "a GPU", 24]], "class": "flux"}


class Measurements:
    """Counts how often it is measured, and finds something else each time."""

    def __init__(self):
        self.count = 0

    def __call__(self) -> Calibration:
        self.count += 1
        return devices(2, Link(1e-5, self.count * 1e9), memory=20 * GB, fixed=1e-3)


def cached(folder: Path, key: dict[str, object], measure: Measurements) -> Calibration:
    """The calibration from its file, or measured and kept."""
    found = load(folder, key)
    if found is None:
        keep(folder, key, found := measure())
    return found


def test_a_calibration_is_measured_once(tmp_path):
    measure = Measurements()
    folder = tmp_path / "not" / "there"
    first = cached(folder, KEY, measure)
    assert cached(folder, KEY, measure) == first
    assert measure.count == 1
    other = cached(folder, KEY | {"class": "sd3"}, measure)
    assert other != first
    assert cached(folder, KEY, measure) == first  # both are kept
    assert measure.count == 2
    assert len(list(folder.iterdir())) == 2
    assert not list(folder.glob("*.part"))


def change(path: tuple, value) -> object:
    def damage(text: str) -> str:
        content = json.loads(text)
        at = content
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        return json.dumps(content)

    return damage


DAMAGES = {
    "cut off": lambda text: text[: len(text) // 2],
    "no object": lambda _text: "[1, 2]",
    "of another machine": change(("key", "class"), "sd3"),
    "an older version": change(("key", "version"), 0),
    "no digest": lambda text: text.replace('"digest"', '"digset"'),
    "another figure": change(("calibration", 5), 1.0),
    "not a number": change(("calibration", 4, 0, 0, 0, 1, 1), math.nan),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_damaged_or_stale_is_measured_again(tmp_path, damage):
    measure = Measurements()
    first = cached(tmp_path, KEY, measure)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    assert damage(whole) != whole
    file.write_text(damage(whole))
    again = cached(tmp_path, KEY, measure)
    assert measure.count == 2
    assert again != first
    assert cached(tmp_path, KEY, measure) == again  # the file is whole again
    assert measure.count == 2


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, caplog):
    measure = Measurements()
    first = cached(tmp_path, KEY, measure)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()

    def full(*_arguments, **_named):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("parallel_backend.core.kept_file.json.dump", full)
        with caplog.at_level(logging.WARNING):
            keep(tmp_path, KEY, measure())
    assert "could not be stored" in caplog.text
    assert file.read_text() == whole
    assert list(tmp_path.iterdir()) == [file]
    assert cached(tmp_path, KEY, measure) == first


# The plan that is kept.


def test_a_plan_is_kept_with_the_model_on_the_ranks(tmp_path):
    left = Setup(tmp_path, "fp32", ("cpu", "cpu"), Degrees(), "auto", planned="cpu,cpu", own_class=mini.mini_flux())
    registry = Registry()
    assert registry.planned(left) is None
    loaded, model = replace(left, degrees=Degrees(ulysses=2)), SimpleNamespace(on_ranks=True)

    def on_ranks(key: Setup) -> Setup:
        registry.models.clear()
        registry.models.add(key, model)
        return key

    assert on_ranks(loaded) == registry.planned(left)
    assert on_ranks(replace(loaded, devices=("cpu",), degrees=Degrees())) == registry.planned(left)  # it may leave some out
    for other in (
        replace(left, planned="cpu,cpu,cpu"),
        replace(left, planned="cpu,cpu pipelined"),
        replace(left, dtype="bf16"),
        replace(left, planned=""),
    ):
        assert registry.planned(other) is None
    on_ranks(replace(loaded, planned=""))  # by hand, although the same degrees
    assert registry.planned(left) is None
    on_ranks(loaded)
    model.on_ranks = False
    assert registry.planned(left) is None
