"""The planner: its cost model against formulas and published runs, calibrations and their files, and what it chooses."""

import dataclasses
import json
import logging
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.predictions import plan as command
from benchmarks.predictions.bridge import BridgedLinks
from benchmarks.predictions.presets import HARDWARE, MODELS
from benchmarks.predictions.published import RUNS, Run, calibration, outside, predicted
from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Offload, Setup
from parallel_backend.families.base.blocks import JOINT, StreamKeys
from parallel_backend.families.base.family import pairs_of
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
    through,
)
from parallel_backend.planning.calibration import calibrate, calibration_key, calibration_of, contexts
from parallel_backend.planning.calibration_file import cached
from parallel_backend.planning.machine import Device, Machine
from parallel_backend.planning.modes import Mode, possible
from parallel_backend.planning.planner import Plan, choose
from parallel_backend.planning.prediction import Prediction, StepKind, cut_model
from parallel_backend.planning.report import _advice, choice, describe_planned
from parallel_backend.planning.workload import Workload, workload_of
from parallel_backend.wire.diagnosis import DeviceMemoryReport, Probed
from parallel_backend.wire.messages import LinksProbed
from testing import mini
from testing.cases import all_cases

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


WITH_ONE = [run for run in RUNS if run.model != "flux-schnell" or (run.width == 2048 and not run.compiled)]
"""Published with the seconds on one device: of Flux-schnell only one run is."""


@pytest.mark.parametrize("run", WITH_ONE, ids=str)
def test_a_block_takes_what_the_run_on_one_device_says(run: Run):
    what = MODELS[run.model].workload(run.model, run.height, run.width, run.steps, text_in_bands=True)
    found = seconds(calibration(run), what, Mode(Degrees(), device=0)) + outside(run, run.height, run.width)
    assert found == pytest.approx(run.one)


def test_without_the_bridge_eight_l40_would_be_predicted_fast(monkeypatch):
    """The control: what makes Ulysses on eight slower than on one is nothing but the link between the sockets."""
    run = next(run for run in RUNS if run.degrees == Degrees(ulysses=8) and run.hardware == "L40")
    assert run.seconds > run.one
    monkeypatch.setitem(HARDWARE, "L40", replace(HARDWARE["L40"], socket=0, bridge=0.0))
    assert predicted(run) < run.one
    assert predicted(run) < (1 - WITHIN) * run.seconds


def test_most_published_runs_are_predicted_rather_than_fitted():
    assert sum(not run.fitted for run in RUNS) >= 2 * sum(bool(run.fitted) for run in RUNS)
    assert {run.fitted for run in RUNS} - {""} == {
        "bandwidth of a link",
        "bandwidth between the sockets",
        "a block's launch",
        "text encoders",
        "VAE",
    }


# The formulas. A: bytes of the hidden states; L layers; N ranks; B bandwidth.

N, B, LATENCY = 4, 10e9, 1e-4
A = 4096 * HIDDEN * 2


def test_bytes_of_a_forward_are_those_of_the_field():
    """Flux at 1024 and N = 4, image tokens alone: GB that a rank sends."""
    on = devices(N)
    sent = {
        axis: max(predict(on, workload(), Mode(Degrees(**{axis: N}), bands)).step_bytes[axis])
        for axis, bands in (("ulysses", 1), ("ring", 1), ("tensor", 1), ("pipe", N))
    }
    assert sent["ulysses"] == pytest.approx(4 / N * A * LAYERS * (N - 1) / N)
    assert sent["ulysses"] / GB == pytest.approx(1.08, abs=0.005)
    assert sent["ring"] / GB == pytest.approx(2.15, abs=0.005)
    assert sent["tensor"] == pytest.approx(4 * A * LAYERS * (N - 1) / N)
    assert sent["pipe"] == A
    displaced = Mode(Degrees(patch=N, patch_mode="displaced"))
    full = 2 * A * LAYERS * (N - 1) / N
    assert max(predict(on, workload(), displaced).step_bytes["patch"]) == pytest.approx(full)
    changes = replace(workload(), sizes=replace(workload().sizes, transfer_dtype="residual"))
    assert max(predict(on, changes, displaced).step_bytes["patch"]) == pytest.approx(full * 18 / 64)  # for 32 values of bf16
    packed = max(predict(on, changes, Mode(Degrees(ulysses=N))).step_bytes["ulysses"])  # 32 values in int8, and their scale
    assert packed == pytest.approx(sent["ulysses"] * 34 / 64)


def test_memory_is_that_of_the_field():
    on, what = devices(N), workload()
    piped = predict(on, what, Mode(Degrees(pipe=N), N)).memory
    assert sum(memory.buffers for memory in piped) / KV_COPIES / GB == pytest.approx(2.9, abs=0.05)
    assert sum(memory.weights for memory in piped) == what.sizes.weight_bytes
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


@pytest.mark.parametrize("bandwidth", [0.5e9, 10e9, 1e18])
def test_ring_by_the_formula(bandwidth):
    what, on = workload(), devices(N, Link(0.0, bandwidth))
    attention = on.costs[0].blocks["blocks"].attention(what.tokens, what.tokens)
    exposed = LAYERS * (N - 1) * max(0.0, 2 * A / (N * bandwidth) - attention / N**2)
    expected = LAYERS * block_seconds(what) / N + exposed
    assert seconds(on, what, Mode(Degrees(ring=N))) == pytest.approx(28 * expected)


def test_keys_that_heads_share_travel_once():
    """Krea 2: 12 heads of keys for 48 of queries. Over a link of 1 GB/s that makes a ring faster than one device."""
    krea = MODELS["krea-2"]
    what = krea.workload("krea-2", 1024, 1024, 28)
    size = what.tokens * what.sizes.token_bytes * krea.layers
    hardware = replace(HARDWARE["RTX 4090"], link=Link(30e-6, 1e9))
    found = plan(hardware.calibration(2, krea), what)
    sent = {each.mode.degrees: max(map(max, each.step_bytes.values()), default=0) for each in found.predictions}
    assert sent[Degrees(ring=2)] == sent[Degrees(patch=2, patch_mode="displaced")] == size * 12 / 48
    assert sent[Degrees(ulysses=2)] == size  # repeated, as the queries are
    exact = next(each for each in found.predictions if each.mode.exact)
    assert exact.mode.degrees == Degrees(ring=2)
    assert exact.seconds == pytest.approx(25.3, abs=0.1)


def test_each_attention_layer_of_a_block_has_its_transfers():
    """The first blocks of SD3.5-medium have two."""
    what, on = workload(), devices(N, Link(LATENCY, B))
    twice = replace(
        what, sizes=replace(what.sizes, attention=((JOINT, StreamKeys(True, (), what.sizes.head_size)),) * LAYERS)
    )
    for degrees in (Degrees(ulysses=N), Degrees(ring=N), Degrees(patch=N, patch_mode="displaced")):
        one, two = (predict(on, each, Mode(degrees)) for each in (what, twice))
        assert two.moved == 2 * one.moved
    waits = 4 * A * LAYERS / N * (N - 1) / (N * B) + 2 * LAYERS * LATENCY
    mode = Mode(Degrees(ulysses=N))
    assert seconds(on, twice, mode) == pytest.approx(seconds(on, what, mode) + 28 * waits)


def test_tensor_by_the_formula():
    what, on = workload(), devices(N, Link(0.0, B))
    expected = LAYERS * block_seconds(what) / N + 4 * A * LAYERS * (N - 1) / N / B
    assert seconds(on, what, Mode(Degrees(tensor=N))) == pytest.approx(28 * expected)


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


def test_fewer_bands_than_stages_leave_stages_idle():
    """min(M, N) - 1 in the place of N - 1, as docs/modes.md has it."""
    what, on = workload(warm_up=0), devices(19)
    tau = 3 * block_seconds(what) / 4
    assert seconds(on, what, Mode(Degrees(pipe=19), 4)) == pytest.approx((28 * 19 + 4 - 1) * tau)


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


def test_text_runs_with_the_first_band_alone_but_in_xdit():
    def tokens(what: Workload) -> list[float]:
        """Of each kind of micro-step, from the bytes that a stage hands on."""
        mode = Mode(Degrees(pipe=2), 4)
        return [prediction._handed_on(what, mode, 0, kind) / what.sizes.token_bytes for kind in StepKind]

    ours = workload(text=512)  # 64 rows of tokens, of which the first band has 10 and the others 18
    assert tokens(ours) == [4608, 1152, 1152]
    assert tokens(replace(ours, text_in_bands=True)) == [4608, 1536, 1536]
    looked_at = replace(FLUX, text=512, joint=False).workload("flux", 1024, 1024, 28)
    assert tokens(looked_at) == [4096, 1024, 1024]


def test_unequal_devices_share_by_speed():
    what, on = workload(), devices(2, speeds=(1.0, 0.5))
    cut = cut_model(CalibratedCosts(on, what), Mode(Degrees(pipe=2), 4))
    assert [len(span) for span in cut.stage_blocks] == [38, 19]
    one = seconds(on, what, Mode(Degrees(), device=0))
    fast = seconds(on, replace(what, warm_up=0), Mode(Degrees(pipe=2), 4))
    assert 1.45 < one / fast <= 1.5  # sum(speed) / max(speed)
    assert seconds(on, what, Mode(Degrees(ulysses=2))) == pytest.approx(one)  # waits for the slow one
    shared = seconds(on, what, Mode(Degrees(patch=2, patch_mode="displaced")))
    assert shared == pytest.approx(one / 1.5)


# Links.


def test_transfers_between_sockets_share_a_bridge():
    links = BridgedLinks(alike(4, Link(0.0, 10.0)), socket=2, bridge=1.0)
    assert links.send(0, 1, 10.0) == 1.0
    assert links.send(1, 2, 10.0) == 10.0
    # Each of two sends 2 of its 3 parts across: 2 x 2 x 3 over the bridge.
    assert links.exchange([range(4)], 9.0) == pytest.approx(12.0)
    assert links.exchange([(0, 1), (2, 3)], 9.0) == pytest.approx(0.9)
    assert links.exchange([(0, 2), (1, 3)], 9.0) == pytest.approx(18.0)  # two groups on one bridge
    assert links.shift([range(4)], 5.0) == pytest.approx(5.0)
    assert links.all_reduce([(0, 1)], 10.0) == pytest.approx(1.0)


def test_links_that_disturb_each_other_are_measured_so():
    times = tuple((size, 1e-5 + size / 5e9) for size in SIZES)
    quiet = max(SIZES) / 5e9 + 1e-5

    def found(together: float) -> list[LinksProbed]:
        return [LinksProbed(0, "", None, None, {1: times}, {}, together), LinksProbed(1, "", None, None, {}, {}, together)]

    assert links_of(found(quiet)).crowding == pytest.approx(1.0)
    crowded = links_of(found(3 * quiet))
    assert crowded.crowding == pytest.approx(3.0)
    assert crowded.link(1, 0).bandwidth == pytest.approx(5e9 / 3)
    assert links_of(found(0.0)).crowding == 1.0
    assert links_of([LinksProbed(0, "", None, None, {}, {})]) == Links({})


# Properties.

fractions = st.floats(0.1, 10)
worlds = st.sampled_from([2, 3, 4, 8])
links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e8, 1e12))


def small(prompts: int, text: int, warm_up: int) -> Workload:
    """Few layers and steps, so that many examples are tried."""
    model = replace(FLUX, layers=10, text=text, prompts=prompts)
    return model.workload("small", 512, 512, 5, warm_up)


workloads = st.builds(small, st.sampled_from([1, 2]), st.sampled_from([0, 300]), st.integers(0, 5))


@pytest.mark.slow
@settings(max_examples=20)
@given(worlds, workloads, links, st.floats(1, 100), st.integers(0, 4), st.floats(1e8, 1e12))
def test_more_bandwidth_is_never_slower(world, what, link, factor, socket, bridge):
    def on(times: float) -> Calibration:
        between = alike(world, Link(link.latency, link.bandwidth * times))
        return linked(devices(world), BridgedLinks(between, 1.5, socket, bridge * times if socket else 0))

    slow, fast = (plan(on(times), what) for times in (1.0, factor))
    for found in slow.predictions:
        again = of_mode(fast, found.mode) if found.mode.device is None else fast.one_device
        assert 0 < again.seconds <= found.seconds * (1 + 1e-9)
        assert math.isfinite(found.seconds)


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
        for axis, counts in each.step_bytes.items():
            assert getattr(each.mode.degrees, axis) > 1
            assert len(counts) == ranks
            assert min(counts) >= 0


@pytest.mark.slow
@settings(max_examples=20)
@given(worlds, workloads, links, st.floats(1, 10), st.floats(0, 1e-3))
def test_a_slower_block_is_never_faster(world, what, link, factor, fixed):
    slow = devices(world, link, (1 / factor,) * world, fixed=fixed)
    for each in plan(devices(world, link), what).predictions:
        assert predict(slow, what, each.mode).seconds >= each.seconds * (1 - 1e-9)


@settings(max_examples=20)
@given(worlds, workloads, st.integers(1, 60), st.integers(1, 60))
def test_more_memory_never_removes_a_mode(world, what, memory, more):
    def fitting(room: int) -> set[str]:
        on = devices(world, memory=room * GB // 4)
        modes = [Mode(Degrees(ulysses=world)), Mode(Degrees(tensor=world)), Mode(Degrees(), device=0)]
        return {str(mode) for mode in modes if not predict(on, what, mode).lacks}

    assert fitting(memory) <= fitting(memory + more)


@given(st.floats(0, 1e-3), st.floats(1e-9, 1e-3), st.sampled_from([0.0, 1e-5, 1e-4]))
def test_a_block_is_found_from_two_lengths(fixed, token, pairs):
    cost = BlockCost(fixed, token, pairs)
    found = through([(tokens, cost.fixed + cost.work(tokens, tokens)) for tokens in (1088, 320)], pairs)
    if (work := cost.work(1088, 1088)) > LEAST_GROWTH * (fixed + work):
        assert (found.fixed, found.token) == pytest.approx((fixed, token), rel=1e-4, abs=1e-9)


@given(st.floats(1e-7, 10), st.floats(1e-7, 10))
def test_whatever_was_measured_gives_a_cost_that_grows(long, short):
    found = through([(1088, long), (320, short)], 1e-5)
    assert found.fixed >= 0
    assert found.token > 0
    assert found.fixed + found.work(1088, 1088) == pytest.approx(long)


# What is chosen.


def test_slow_links_want_pipefusion_and_fast_ones_what_is_exact():
    what = workload(text=512)
    slow = plan(devices(4, Link(1e-5, 1e9)), what)
    assert slow.best.mode.degrees == Degrees(pipe=4)
    assert slow.best_exact.mode.device is not None
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


@pytest.mark.parametrize(
    ("mode", "layers"),
    [
        (Mode(Degrees(patch=2, patch_mode="displaced")), LAYERS),
        (Mode(Degrees(pipe=2), 4), math.ceil(LAYERS / 2)),
        (Mode(Degrees(ulysses=2)), 0),
    ],
    ids=str,
)
def test_keeping_keys_takes_time_in_every_call_that_keeps_them(mode, layers):
    """Of all tokens, of the rank's layers, once a call. With more patches than stages no stage waits for another one."""
    what, rate = workload(text=512), 1e-12
    on = devices(mode.degrees.world)
    slower = replace(on, costs=tuple(replace(cost, keeping=rate) for cost in on.costs))
    more = seconds(slower, what, mode) - seconds(on, what, mode)
    a_call = layers * 2 * what.tokens * what.sizes.token_bytes * rate
    assert more == pytest.approx((what.steps - 1) * a_call, rel=0.05)


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


def test_nothing_is_said_of_stages_that_are_only_imagined(caplog):
    with caplog.at_level(logging.WARNING):
        plan(devices(2, memory=GB), workload())
    assert not caplog.records


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


def test_streamed_weights_need_host_memory():
    on = streaming(2, 10 * GB)
    short, enough = (replace(on, machine=replace(on.machine, host_free=free * GB)) for free in (16, 20))
    for degrees in (Degrees(ulysses=2), Degrees(pipe=2)):  # in one copy, or in two different halves
        mode = Mode(degrees, degrees.pipe)
        assert not predict(enough, workload(), mode).lacks
        assert ("host memory together, 16.0 GB is free" in predict(short, workload(), mode).lacks) == (degrees.pipe == 1)


def test_fewer_patches_are_advised_where_each_streams_the_stage_and_the_report_says_so():
    """Flux-dev on two cards of 12 GB."""
    found = planner.plan(CalibratedCosts(streaming(2, 12 * GB, link=Link(1e-5, 3e9)), workload(text=512)))
    assert found.best.mode == Mode(Degrees(pipe=2), 2)
    more = of_mode(found, Mode(Degrees(pipe=2), 4))
    assert more.seconds > found.best.seconds
    text = "\n".join((describe_planned(found), _advice(found)))
    kept = [one.weights.total - one.streamed for one in found.best.held]
    assert f"cuda:0 {kept[0] / 1e9:.2f} GB and {found.best.held[0].streamed / 1e9:.2f} GB, cuda:1" in text
    assert f"with 4 patches {more.seconds:.2f} s: every patch brings the stage's weights once more" in text
    ulysses = of_mode(found, Mode(Degrees(ulysses=2)))
    assert f"ulysses_degree 2 (exact): {ulysses.seconds:.2f} s; streams {ulysses.most_streamed / 1e9:.2f} GB" in text


# Calibrations.


def tiny_workload(mini_file) -> Workload:
    what = workload_of(mini.opened(mini_file, text=8), "fp32", "cpu", (1, 16, 16, 12), 2, 4, 8)
    return replace(what, trials=mini.trials())


@pytest.fixture(scope="module")
def calibrated(pools, mini_file) -> Calibration:
    pools.forget(2)
    found = calibrate(pools(2), mini.opened(mini_file, text=8), "fp32", lambda: None)
    pools.forget(2)
    return found


def test_two_ranks_are_calibrated(calibrated, mini_file):
    assert calibrated.machine.names == ("cpu", "cpu")
    for costs in calibrated.costs:
        assert set(costs.blocks) == {"double_blocks", "single_blocks"}
        # Modulation has one row for all tokens.
        assert all(cost.token > 0 and cost.pairs == pytest.approx(1 / (6 * 128), rel=0.03) for cost in costs.blocks.values())
    assert all(device.memory is None for device in calibrated.machine.devices)
    assert calibrated.machine.links.link(1, 0).bandwidth > 0
    assert calibrated.machine.links.crowding >= 1
    found = plan(calibrated, tiny_workload(mini_file))
    assert {each.mode for each in found.predictions} > set(possible(tiny_workload(mini_file), 2)[0])
    assert all(0 < each.seconds < math.inf for each in found.predictions)
    text = describe_planned(found)
    assert "ulysses_degree 2 (exact)" in text
    assert "best: " in text


@pytest.mark.parametrize("degrees", [Degrees(ulysses=2), Degrees(ring=2), Degrees(pipe=2)], ids=str)
def test_bytes_are_those_of_a_real_call(calibrated, mini_file, pools, degrees):
    what = replace(tiny_workload(mini_file), warm_up=4)
    expected = predict(calibrated, what, Mode(degrees, degrees.pipe)).step_bytes
    model = pools.mini(mini_file, degrees)
    model.close_run(0, lambda: None)
    x, timestep, tensors = mini.inputs(batch=2, height=16, width=12, text=8)
    model.predict(ModelCall(x, timestep, tensors), lambda: None)
    for rank, stats in enumerate(model.close_run(0, lambda: None)):
        assert stats.bytes_sent == {axis: counts[rank] for axis, counts in expected.items() if counts[rank]}


SUMS = {
    "wan-animate-2": {"blocks.0": 1.5},  # of half of what a token has between blocks
}
"""Kind of block -> results that tensor ranks add up in it."""


@pytest.mark.parametrize("case", [case for case in all_cases() if case.name in SUMS], ids=lambda case: case.name)
def test_what_tensor_ranks_add_up_is_read_off_the_file(case, tmp_path):
    checkpoint = open_checkpoint(case.save(case.model(), tmp_path / "model.safetensors"))
    assert workload_of(checkpoint, "fp32", "cpu", (1, *case.latent), 1, 4, 8).sums == SUMS[case.name]


def test_weights_are_those_of_real_ranks(calibrated, mini_file, pools):
    """Altogether: how a pipeline shares them out depends on what was measured."""
    for degrees in (Degrees(ulysses=2), Degrees(pipe=2)):
        found = predict(calibrated, tiny_workload(mini_file), Mode(degrees, degrees.pipe))
        held = pools.mini(mini_file, degrees).weight_bytes
        assert sum(memory.weights for memory in found.memory) == pytest.approx(sum(held), rel=0.02)


def test_a_gpu_keeps_some_memory_for_its_processes(mini_file):
    file = mini.opened(mini_file, text=8)
    times = dict.fromkeys(file.family.blocks.counts(file.config), (2e-3, 1e-3))
    found = [LinksProbed(0, "a GPU", 9 * GB, 24 * GB, {}, {})]
    memories = [DeviceMemoryReport(0, "a card", 9 * GB, 0, 0, 24 * GB, "here", 64 * GB, 25e9)]
    made = calibration_of(
        ("cuda:0",), file, found, memories, [Probed(0, times, (1e-3, 1e-3), 9 * GB)], (64 * 32 + 64, 16 * 32 + 64)
    )
    assert made.machine.devices == (Device("cuda:0", "a GPU", 24 * GB - contexts("cuda:0"), None, 25e9),)
    assert set(made.costs[0].blocks) == set(times)


KEY = {"version": 1, "devices": [["cuda:0", "a GPU", 24]], "family": "flux"}


class Measurements:
    """Counts how often it is measured, and finds something else each time."""

    def __init__(self):
        self.count = 0

    def __call__(self) -> Calibration:
        self.count += 1
        return devices(2, Link(1e-5, self.count * 1e9), memory=20 * GB, fixed=1e-3)


def test_a_calibration_is_measured_once(tmp_path):
    measure = Measurements()
    folder = tmp_path / "not" / "there"
    first = cached(folder, KEY, measure)
    assert cached(folder, KEY, measure) == first
    assert measure.count == 1
    other = cached(folder, KEY | {"family": "sd3"}, measure)
    assert other != first
    assert cached(folder, KEY, measure) == first  # both are kept
    assert measure.count == 2
    assert len(list(folder.iterdir())) == 2
    assert not list(folder.glob("*.part"))


def damage_text(text: str) -> str:
    return text[: len(text) // 2]


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
    "cut off": damage_text,
    "empty": lambda _text: "",
    "no object": lambda _text: "[1, 2]",
    "nothing": lambda _text: "null",
    "of another machine": change(("key", "family"), "sd3"),
    "an older version": change(("key", "version"), 0),
    "no key": lambda text: text.replace('"key"', '"kye"'),
    "no digest": lambda text: text.replace('"digest"', '"digset"'),
    "another figure": change(("calibration", "hop"), 1.0),
    "a link is missing": change(("calibration", "between"), []),
    "not a number": change(("calibration", "costs", 0, "blocks", "blocks", "token"), math.nan),
    "a device without costs": change(("calibration", "costs", 1), {}),
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


def test_a_file_that_is_no_text_is_measured_again(tmp_path):
    measure = Measurements()
    cached(tmp_path, KEY, measure)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"\xff\xfe\x00")
    cached(tmp_path, KEY, measure)
    assert measure.count == 2


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, caplog):
    measure = Measurements()
    first = cached(tmp_path, KEY, measure)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()

    def full(*_arguments, **_named):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("parallel_backend.core.json_file.json.dump", full)
        patch.setattr("parallel_backend.planning.calibration_file.load", lambda path, key: None)
        with caplog.at_level(logging.WARNING):
            assert cached(tmp_path, KEY, measure) != first
    assert "could not be kept" in caplog.text
    assert file.read_text() == whole
    assert list(tmp_path.iterdir()) == [file]
    assert cached(tmp_path, KEY, measure) == first


def test_a_folder_that_is_a_file_costs_a_measurement(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    measure = Measurements()
    for _ in range(2):
        cached(tmp_path / "file", KEY, measure)
    assert measure.count == 2
    assert "could not be kept" in caplog.text


def test_the_key_tells_apart_what_matters(mini_file, tmp_path):
    file = mini.opened(mini_file, text=8)
    one = calibration_key(("cpu", "cpu"), file, "fp32", "auto")
    assert json.loads(json.dumps(one)) == one
    others = [
        calibration_key(("cpu",), file, "fp32", "auto"),
        calibration_key(("cpu", "cpu"), file, "bf16", "auto"),
        calibration_key(("cpu", "cpu"), file, "fp32", "sdpa"),
    ]
    wider = mini.CONFIG | {"width": 64}
    path = mini.save(mini.random_model(wider), tmp_path / "wider.safetensors")
    others.append(calibration_key(("cpu", "cpu"), mini.opened(path), "fp32", "auto"))
    assert all(one != other for other in others)
    assert one == calibration_key(("cpu", "cpu"), file, "fp32", "auto")


# The plan that is kept.


class FakeModel:
    on_ranks = True


def test_a_plan_is_kept_with_the_model_on_the_ranks(tmp_path):
    left = Setup(tmp_path, "fp32", ("cpu", "cpu"), Degrees(), "auto", planned="cpu,cpu")
    registry = Registry()
    assert registry.planned(left) is None
    loaded, model = replace(left, degrees=Degrees(ulysses=2)), FakeModel()

    def on_ranks(key: Setup) -> Setup:
        registry._models.clear()
        registry._models.add(key, model)
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


# The command line.


def test_the_command_prints_a_table(capsys):
    command.main(["--device", "L40", "--count", "4", "--model", "flux-dev", "--size", "1024"])
    text = capsys.readouterr().out
    assert "4 x L40 (PCIe), links 3 GB/s" in text
    assert "best: pipefusion_degree 4" in text
    assert "best that is exact throughout" in text
    command.main(["--device", "H100", "--model", "hunyuan-video", "--size", "1280x720"])
    assert "does not fit: needs" in capsys.readouterr().out


def test_given_figures_take_the_place_of_the_presets():
    given = "--device L40 --count 2 --block-ms 8 --bandwidth 12 --latency 5 --memory 24 --prompts 2 --warmup 0"
    costs = command.costs_of(command.arguments(given.split()))
    machine, what = costs.machine, costs.workload
    assert costs.calibration.costs[0].blocks["blocks"].whole(what.tokens) == pytest.approx(8e-3)
    assert machine.links.link(0, 1) == Link(5e-6, 12e9)
    assert not machine.links.bridge
    assert machine.devices[0].memory == 24 * GB
    assert (what.entries, what.warm_up) == (2, 0)


@pytest.mark.parametrize(
    "given", ["--count 0", "--size 1000", "--size 64x64x64", "--bandwidth -1", "--device T4", "--steps x"]
)
def test_nonsense_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        command.arguments(given.split())
    assert "error: argument --" in capsys.readouterr().err


def test_a_choice_in_a_line():
    found = plan(devices(2), workload())
    assert choice(found.one_device, found.costs.machine).startswith("one device, cuda:0, planned ")
    ulysses = of_mode(found, Mode(Degrees(ulysses=2)))
    assert choice(ulysses, found.costs.machine).startswith("ulysses_degree 2 on cuda:0, cuda:1, planned ")
    assert dataclasses.asdict(ulysses)["lacks"] == ""
