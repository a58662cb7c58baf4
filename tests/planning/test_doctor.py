"""Parallel Doctor: what it works out from measurements, by hand and against real runs, and what it says."""

import dataclasses
import math
import re
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.call import ModelCall
from parallel_backend.client.registry import Registry
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split_carrying
from parallel_backend.core.validate import check_model
from parallel_backend.families.base.blocks import JOINT, StreamKeys
from parallel_backend.placement.links import SIZES, Link, Links, alike, fit
from parallel_backend.placement.model_sizes import ModelSizes
from parallel_backend.placement.pipeline_model import StageCost, finish_times
from parallel_backend.planning.doctor import examine, measure
from parallel_backend.planning.machine import Device, Machine
from parallel_backend.planning.modes import Mode, possible
from parallel_backend.planning.planner import plan
from parallel_backend.planning.prediction import AROUND, StepCost, cut_model, predict, step_bytes
from parallel_backend.planning.rehearsal import CallKind, Rehearsed, rehearse
from parallel_backend.planning.rehearsed_costs import ALONE, RehearsedCosts, banded_call, needed
from parallel_backend.planning.report import compare, describe_rehearsed, settings, verdict
from parallel_backend.planning.workload import Workload, workload_of
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.cases import all_cases
from testing.models import on_ranks

GB = 10**9
NVLINK, PCIE, ETHERNET = Link(1e-5, 200e9), Link(2e-5, 12e9), Link(1e-4, 0.3e9)
DISPLACED = Degrees(patch=2, patch_mode="displaced")


def workload(heads: int = 24, count: int = 57, **changes) -> Workload:
    """Flux-dev at 1024 x 1024 in bf16, without its distillation: 57 blocks of one kind, 24 heads, two prompts."""
    sizes = ModelSizes(
        block_bytes=(400 * 10**6,) * count,
        ends=(10**8, 10**8, 0),
        attention=((JOINT,),) * count,
        heads=heads,
        sharing=1,
        head_size=3072 // heads,
        hidden=3072,
        itemsize=2,
        joint=True,
    )
    known = Workload(
        name="big.safetensors",
        kind="flux",
        dtype="bf16",
        shape=(1, 16, 128, 128),
        entries=2,
        steps=28,
        prompt=512,
        blocks=("blocks.0",) * count,
        sizes=sizes,
        grid=(64, 64),
        text=512,
    )
    return dataclasses.replace(known, **changes)


def machine(speeds: Sequence[float], link: Link = NVLINK, free: float | Sequence[float] = 80 * GB) -> Machine:
    """GPUs with these speeds, the first one's being 1, all linked alike. The speed is the name, for `costs`."""
    world = len(speeds)
    room = [free] * world if isinstance(free, (int, float)) else free
    devices = [Device(f"cuda:{rank}", f"GPU {speed}", int(room[rank]), int(room[rank])) for rank, speed in enumerate(speeds)]
    peers = {(one, two): link is not ETHERNET for one in range(world) for two in range(world) if one != two}
    return Machine(tuple(devices), Links(alike(world, link)), peers=peers)


def rehearsed(what: Workload, on: Machine, kind: CallKind, block: float = 0.02) -> Rehearsed:
    """By the textbook (docs/modes.md): a block takes `block` seconds, its transfers what their bytes need on the link.

    Ring and old keys travel beside the computing. A smaller micro-step is a little less efficient.
    """
    cut, world = kind.degrees, len(on.devices)
    link = on.links.link(0, 1) if world > 1 else Link(0.0, 1.0)
    speeds = [float(device.kind.removeprefix("GPU ")) for device in on.devices]
    share = 1 / (cut.world * kind.bands)
    activations = kind.entries * what.tokens * what.sizes.token_bytes / kind.bands
    sent = {
        "ulysses": 4 * activations * (cut.ulysses - 1) / cut.ulysses / cut.world,
        "ring": 2 * activations * (cut.ring - 1) / cut.world,
        "tensor": 4 * activations * (cut.tensor - 1) / cut.world,
        "patch": 2 * activations * (cut.patch - 1) / cut.world,
    }
    latencies = {"ulysses": 2, "ring": cut.ring - 1, "tensor": 4, "patch": 1}
    hidden = {"ring", *(["patch"] if kind.stale else [])}

    def seconds(group: range) -> float:
        compute = kind.entries * block * (share + 0.005) / min(speeds[rank] for rank in group)
        on_the_way = {axis: latencies[axis] * link.latency + size / link.bandwidth for axis, size in sent.items() if size}
        overlapped = sum(on_the_way[axis] for axis in on_the_way if axis in hidden)
        return max(compute, overlapped) + sum(on_the_way[axis] for axis in on_the_way if axis not in hidden)

    groups = [range(rank - rank % cut.world, rank - rank % cut.world + cut.world) for rank in range(world)]
    cost = StepCost({"blocks.0": tuple(seconds(group) for group in groups)}, (0.004,) * world, 0.002)
    moved = {axis: (round(size * kind.bands),) * world for axis, size in sent.items() if size}
    return Rehearsed(cost, cost, {"blocks.0": moved, AROUND: {}}, (2 * GB,) * world)


def costs(what: Workload, on: Machine) -> RehearsedCosts:
    modes, _ = possible(what, len(on.devices)) if len(on.devices) > 1 else ([], {})
    return RehearsedCosts(what, on, {kind: rehearsed(what, on, kind) for kind in needed(modes, what)})


def changed(known: RehearsedCosts, kind: CallKind, **fields) -> RehearsedCosts:
    """The same, but for what was found for one kind of call."""
    return dataclasses.replace(
        known, rehearsed=known.rehearsed | {kind: dataclasses.replace(known.rehearsed[kind], **fields)}
    )


def test_of_two_rehearsals_the_less_disturbed_counts():
    one = rehearsed(workload(), machine([1.0, 1.0]), CallKind(Degrees(), 1))
    two = dataclasses.replace(one, first=StepCost({"blocks.0": (0.01, 9.0)}, (9.0, 0.001), 9.0))
    best = one.quicker(two)
    assert best.first == StepCost({"blocks.0": (0.01, one.first.blocks["blocks.0"][1])}, (0.004, 0.001), 0.002)
    assert (best.other, best.sent) == (one.other, one.sent)
    assert two.quicker(one).first == best.first


def test_a_line_through_transfers():
    link = fit([(size, 3e-5 + size / 5e9) for size in SIZES])
    assert (link.latency, link.bandwidth) == pytest.approx((3e-5, 5e9))
    noisy = fit([(1024, 5e-5), (1 << 16, 2e-5), (1 << 20, 2e-5), (1 << 23, 1e-5)])  # nonsense, as it may be measured
    assert noisy.bandwidth > 0
    assert 0 <= noisy.latency <= 5e-5


@pytest.mark.parametrize(("stages", "bands", "hop"), [(2, 2, 0.0), (2, 4, 0.1), (3, 6, 0.3), (4, 4, 0.05)])
def test_a_pipeline_goes_through_the_schedule(stages, bands, hop):
    """Its stages' seconds are those of their blocks, and half of what is around them."""
    known = costs(workload(entries=1, warm_up=3), machine([1.0] * stages, Link(0.0, 1e18)))
    mode = Mode(Degrees(pipe=stages), bands)
    for kind in (CallKind(Degrees(), 1, buffered=True), banded_call(mode, known.workload)):
        call = known.rehearsed[kind].first
        part = 1 / kind.bands
        cost = StepCost({"blocks.0": (part * 0.02,) * stages}, (part * 0.004,) * stages, hop)
        assert set(call.blocks) == set(cost.blocks)
        known = changed(known, kind, first=cost, other=cost)
    sizes = [len(span) for span in cut_model(known, mode).stage_blocks]
    stage_costs = [StageCost(0.0, 0.02 * size + 0.002) for size in sizes]
    expected = finish_times([step < 3 for step in range(28)], bands, stage_costs, hop)[-1] + hop
    assert predict(known, mode).seconds == pytest.approx(expected)


def test_whole_calls_by_hand():
    """Ulysses over two devices: 57 blocks and what is around them, slowest rank, and the hop, 28 times."""
    at = costs(workload(entries=1), machine([1.0, 1.0]))
    call = at.rehearsed[CallKind(Degrees(ulysses=2), 1)]
    expected = 28 * (0.002 + 0.004 + 57 * call.first.blocks["blocks.0"][0])
    assert predict(at, Mode(Degrees(ulysses=2))).seconds == pytest.approx(expected)
    stale = at.rehearsed[CallKind(DISPLACED, 1, buffered=True, stale=True)]
    exact = at.rehearsed[CallKind(DISPLACED, 1, buffered=True)]
    steps = [0.006 + 57 * call.first.blocks["blocks.0"][0] for call in (exact, stale)]
    assert predict(at, Mode(DISPLACED)).seconds == pytest.approx(steps[0] + 27 * steps[1])


def on_cpus(on: Machine, host_free: int | None = None) -> Machine:
    """The same with CPU ranks."""
    return dataclasses.replace(on, devices=tuple(Device("cpu", device.kind) for device in on.devices), host_free=host_free)


def test_one_cpu_rank_is_quicker_where_the_others_are_idle():
    at = costs(workload(), on_cpus(machine([1.0, 1.0])))
    at = changed(at, ALONE, first=StepCost({"blocks.0": (0.01, 0.0)}, (0.003, 0.0), 0.002))
    assert predict(at, Mode(Degrees(), device=0)).seconds == pytest.approx(28 * (0.002 + 2 * (0.003 + 57 * 0.01)))
    gpu = costs(workload(), machine([1.0, 0.5]))
    busy = gpu.rehearsed[CallKind(Degrees(), 2)].first
    for device in range(2):
        expected = 28 * (0.002 + 0.004 + 57 * busy.blocks["blocks.0"][device])
        assert predict(gpu, Mode(Degrees(), device=device)).seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("world", "heads", "blocks", "entries"), [(2, 24, 57, 2), (4, 3, 57, 1), (6, 4, 3, 2), (8, 24, 6, 8)]
)
def test_the_search_lists_what_can_be_and_nothing_else(world, heads, blocks, entries):
    what = workload(heads=heads, count=blocks, entries=entries)
    modes, refused = possible(what, world)
    listed = {mode.degrees for mode in modes}
    for degrees in listed:
        assert degrees.world == world
        assert degrees.batch <= entries
        check_model(degrees, heads=heads, blocks=blocks)
    for mode in modes:
        assert (mode.bands > 1) == (mode.degrees.pipe > 1)
    assert not listed & refused.keys()
    assert all(refused.values())
    alone = {axis: Degrees(**{axis: world, "patch_mode": "displaced" if axis == "patch" else "none"}) for axis in AXES}
    assert listed | refused.keys() >= set(alone.values())


def test_a_tiny_picture_is_not_cut_into_more_than_it_has():
    what = workload(grid=(2, 2), shape=(1, 16, 4, 4))
    modes, refused = possible(what, 8)
    assert all(mode.bands <= 2 and mode.degrees.sequence <= 4 for mode in modes)
    assert "too few to be cut so" in refused[Degrees(ulysses=8)]


@pytest.mark.parametrize("text", [0, 512])
def test_no_patch_has_fewer_tokens_than_ranks_that_share_it(text):
    """The first patch has fewer rows for the text that it carries. RemoteTransformer.call refuses ranks without a token."""
    what = workload(grid=(8, 1), text=text)
    modes, refused = possible(what, 8)
    for mode in modes:
        for band in split_carrying(Span(0, 8), mode.bands, text):
            assert all(SequenceCut((1.0,), mode.degrees.sequence, False).image(band))
    assert (Mode(Degrees(pipe=2, ulysses=4), 2) in modes) == (text == 0)
    assert (Degrees(pipe=2, ulysses=4) in refused) == (text > 0)


def test_a_slower_link_never_makes_a_mode_faster():
    modes, _ = possible(workload(), 4)
    quiet = {mode for mode in modes if mode.stage_degrees.world == 1}  # they move hidden states between stages, or nothing
    ulysses = Mode(Degrees(ulysses=4))
    before: dict[Mode, float] = {}
    quicker: set[Mode] = set()
    for bandwidth in (2000e9, 50e9, 12e9, 3e9, 0.5e9):
        found = plan(costs(workload(), machine([1.0] * 4, Link(1e-5, bandwidth))))
        seconds = {prediction.mode: prediction.seconds for prediction in found.predictions}
        assert all(seconds[mode] >= before.get(mode, 0.0) * (1 - 1e-9) for mode in modes)
        now = {mode for mode in quiet if seconds[mode] < seconds[ulysses]}
        assert quicker <= now
        before, quicker = seconds, now
    assert quicker == quiet


def test_more_memory_never_removes_a_mode():
    fitting: set[Mode] = set()
    for free in (4, 8, 14, 26, 40, 80):
        found = plan(costs(workload(), machine([1.0] * 4, free=free * GB)))
        now = {prediction.mode for prediction in found.predictions if not prediction.lacks}
        assert fitting <= now
        fitting = now
    assert Mode(Degrees(ulysses=4)) in fitting
    found = plan(costs(workload(), machine([1.0] * 4, free=4 * GB)))
    assert found.best is None
    assert "nothing fits these devices" in describe_rehearsed(found)


def test_memory_by_hand():
    at = costs(workload(entries=1), machine([1.0, 1.0]))
    whole = 57 * 400 * 10**6 + 2 * 10**8
    assert [memory.total for memory in predict(at, Mode(Degrees(ulysses=2))).memory] == [whole + 2 * GB] * 2
    piped = predict(at, Mode(Degrees(pipe=2), 4)).memory
    assert sum(memory.weights for memory in piped) == whole
    assert sum(memory.buffers for memory in piped) == 57 * 4 * 4608 * 6144
    assert [memory.activations for memory in piped] == [2 * GB] * 2
    assert max(memory.weights for memory in piped) <= 29 * 400 * 10**6 + 10**8
    sharded = predict(at, Mode(Degrees(tensor=2))).memory
    assert sharded[0].weights == 57 * 200 * 10**6 + 2 * 10**8


@pytest.mark.parametrize("larger", ["exact", "banded"])
def test_activations_are_those_of_the_call_that_takes_most(larger):
    at, mode = costs(workload(), machine([1.0, 1.0])), Mode(Degrees(pipe=2), 4)
    kinds = {"exact": CallKind(Degrees(), 1, buffered=True), "banded": banded_call(mode, at.workload)}
    at = changed(at, kinds[larger], activation_bytes=(3 * GB, 5 * GB))
    assert [memory.activations for memory in predict(at, mode).memory] == [3 * GB, 5 * GB]
    unknown = changed(at, kinds[larger], activation_bytes=(None, 5 * GB))  # then the estimate counts
    estimate, measured = (memory.activations for memory in predict(unknown, mode).memory)
    assert measured == 5 * GB
    assert 0 < estimate != 2 * GB


def test_keys_of_a_second_attention_are_counted():
    """As SD3.5 medium has: beside the joint attention one over the image alone."""
    what = workload(entries=1)
    twice = dataclasses.replace(what.sizes, attention=((JOINT, StreamKeys(True, (), what.sizes.head_size)),) * 57)
    both = costs(dataclasses.replace(what, sizes=twice), machine([1.0, 1.0]))
    held = sum(memory.buffers for memory in predict(both, Mode(Degrees(pipe=2), 4)).memory)
    assert held == 57 * 4 * (4608 + 4096) * 6144


def test_memory_of_cpu_ranks_is_shared():
    on = on_cpus(machine([1.0, 1.0]), 27 * GB)
    at = costs(workload(), on)
    assert not predict(at, Mode(Degrees(), device=0)).lacks
    # The weights, 23 GB, are there once; what each rank computes with is its own.
    assert "need 27.0 GB of host memory together, 27.0 GB is free" in predict(at, Mode(Degrees(ulysses=2))).lacks


def test_two_unequal_gpus():
    at = costs(workload(entries=1), machine([1.0, 0.5], PCIE))
    stages = cut_model(at, Mode(Degrees(pipe=2), 4)).stage_blocks
    assert len(stages[0]) == 38  # two thirds of 57
    found = plan(at)
    assert found.one_device.mode.device == 0
    assert found.best.mode.degrees.pipe == 2
    ulysses = next(p for p in found.predictions if p.mode.degrees == Degrees(ulysses=2))
    assert ulysses.seconds > found.one_device.seconds  # it waits for the slow one in every block
    assert "cuda:0" in describe_rehearsed(found)


def test_four_gpus_with_slow_links():
    found = plan(costs(workload(entries=1), machine([1.0] * 4, ETHERNET)))
    assert found.best.mode.degrees == Degrees(pipe=4)
    text = describe_rehearsed(found)
    assert "P2P access: not between 0-1, 0-2" in text
    assert f"num_pipeline_patch {found.best.mode.bands}" in text
    assert "the fastest that is exact throughout: one device (cuda:0)" in text
    assert "0-1 0.3 GB/s, 100 us" in text


def test_eight_gpus_with_fast_links():
    found = plan(costs(workload(), machine([1.0] * 8)))
    assert found.best.mode.exact
    assert found.best.mode.degrees.batch == 2  # both prompts side by side cost nothing
    assert found.best.seconds < found.one_device.seconds / 6
    text = describe_rehearsed(found)
    assert "P2P access: between all of them" in text
    assert "split_batch_degree 2" in settings(found.best.mode, found.costs.machine)
    assert "split_batch_degree is 8, and a model call has 2 in its batch" in text


def test_one_gpu_stays_alone():
    found = plan(costs(workload(), machine([1.0])))
    assert len(found.predictions) == 1
    assert "advice: stay on one GPU (cuda:0)" in describe_rehearsed(found)


def test_gpus_that_gain_nothing_stay_alone():
    """Links so slow that nothing pays, and a picture so small that patches do not either."""
    crawl = Link(0.5, 1e6)
    found = plan(costs(workload(entries=1), machine([1.0] * 2, crawl)))
    text = describe_rehearsed(found)
    assert "advice: stay on one GPU (cuda:0)" in text
    assert "the best of the others" in text
    assert f"a model call has {workload().tokens} tokens, too few for several GPUs and these links" in text
    assert settings(found.best.mode, found.costs.machine).splitlines()[0] == (
        "Parallel DiT Loader: pipefusion_degree 1, tensor_parallel_degree 1, split_batch_degree 1, devices cuda:0"
    )


def test_a_gain_above_the_number_of_ranks_is_not_advised():
    """One device was measured while the machine was busy, so that two seem 3.5 times as fast."""
    idle = plan(costs(workload(), machine([1.0, 1.0])))
    slower = 3.5 * idle.predictions[0].seconds / idle.one_device.seconds
    seen = tuple(
        dataclasses.replace(each, seconds=slower * each.seconds) if each.mode.device is not None else each
        for each in idle.predictions
    )
    busy = dataclasses.replace(idle, predictions=seen)
    assert "3.50x on 2 ranks is not credible" in verdict(busy)
    text = describe_rehearsed(busy) + compare(busy, busy)
    assert "3.50x on 2 ranks is not credible" in text
    assert "Parallel DiT Loader: " not in text and "\nbest: not known" in text
    assert verdict(idle).startswith(f"advice: {idle.best.mode}, ") and verdict(idle).endswith(" x one device")
    assert not idle.doubt


def test_of_equally_fast_modes_the_exact_one_is_advised():
    at = costs(workload(), machine([1.0, 1.0]))
    found = plan(at)
    fastest, advised = found.predictions[0], found.best
    assert advised.mode.exact
    assert advised.seconds <= 1.03 * fastest.seconds
    loose = [prediction for prediction in found.predictions if prediction.seconds > 1.03 * fastest.seconds]
    assert advised not in loose


def test_a_model_too_large_for_one_device_gets_a_pipeline_and_says_why():
    """23 GB of weights on cards of 20 GB with slow links; fast links would make it tensor parallel."""
    found = plan(costs(workload(entries=1), machine([1.0] * 2, ETHERNET, free=20 * GB)))
    assert found.best.mode.degrees == Degrees(pipe=2)
    text = describe_rehearsed(found)
    assert "no single device can run this model: one needs 25.0 GB on cuda:0, which has 20.0 GB free" in text
    assert re.search("ulysses_degree 2 [(]exact[)]; does not fit: needs 25.0 GB on cuda:[01], which has 20.0 GB free", text)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_report_names_every_mode(world):
    text = describe_rehearsed(plan(costs(workload(), machine([1.0] * world))))
    for widget in ("pipefusion", "ulysses", "ring", "tensor_parallel", "patch"):
        assert f"{widget}_degree {world}" in text
    assert ("split_batch_degree 2 (exact)" if world == 2 else f"split_batch_degree is {world}") in text
    assert "one device (cuda:0)" in text


# On real ranks.


def tiny_workload(mini_file, entries: int = 2, steps: int = 4) -> Workload:
    what = workload_of(mini.opened(mini_file, text=8), "fp32", "cpu", (1, 16, 16, 12), entries, steps, 8)
    return dataclasses.replace(what, trials=mini.trials())


@pytest.fixture(scope="module")
def once():
    """Everything is rehearsed once, and ranks count as equally fast: no test looks at how long something took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel_backend.planning.rehearsed_costs.ALIKE", math.inf)
        patch.setattr("parallel_backend.planning.rehearsal.REPEATS", (1, 1))
        yield


@pytest.fixture(scope="module")
def examined(pools, mini_file, once):
    """The findings on two CPU ranks."""
    pools.forget(2)
    return examine(pools(2), mini.opened(mini_file, text=8), tiny_workload(mini_file), "sdpa", lambda: None, lambda: None)


def real_run(pools, mini_file, known: RehearsedCosts, mode: Mode, steps: int):
    """What the ranks report of a run of this mode, its stages cut as predicted."""
    stages = "even"
    if mode.degrees.pipe > 1:
        stages = ",".join(str(len(span)) for span in cut_model(known, mode).stage_blocks)
    pool = pools(mode.degrees.world)
    model = on_ranks(pool, mini.opened(mini_file, text=8), mode.degrees, "fp32", "sdpa", lambda: None, stages)
    x, _, tensors = mini.inputs(batch=2, height=16, width=12, text=8)
    prompt, sigmas = Prompt(tensors, {}, 1.0), linear_sigmas(steps)
    if mode.exact:
        sample_whole(model, x, sigmas, prompt)
        return model, model.close_run(model.open_run(), lambda: None)
    return model, sample_in_bands(model, x, sigmas, prompt, mode.bands, warm_up=1)[1]


def check_run(known: RehearsedCosts, prediction, stats, model, steps: int) -> None:
    """What each rank sent along each axis, and what it held. In a band without words each rank has a token in their place,
    which is not counted between stages."""
    mode = prediction.mode
    exact, later = step_bytes(known, mode, cut_model(known, mode), exact=True), prediction.step_bytes
    for rank, what in enumerate(stats):
        expected = {}
        for axis in {*exact, *later}:
            first, others = (by.get(axis, (0,) * len(stats))[rank] for by in (exact, later))
            expected[axis] = first + (steps - 1) * others
        if mode.bands == 1:
            assert what.bytes_sent == {axis: count for axis, count in expected.items() if count}
        else:
            assert what.bytes_sent == pytest.approx({axis: count for axis, count in expected.items() if count}, rel=0.08)
        memory = prediction.memory[rank]
        assert model.weight_bytes[rank] == pytest.approx(memory.weights, rel=0.02)
        assert what.buffer_bytes == pytest.approx(memory.buffers, rel=0.01)


TWO = [mode for mode in possible(workload(grid=(8, 8)), 2)[0] if mode.bands < 8]


@pytest.mark.parametrize("mode", TWO, ids=str)
def test_traffic_weights_and_buffers_are_those_of_real_runs(examined, pools, mini_file, mode):
    model, stats = real_run(pools, mini_file, examined.costs, mode, 4)
    (prediction,) = (found for found in examined.predictions if found.mode == mode)
    check_run(examined.costs, prediction, stats, model, 4)
    pools.forget(2)


FOUR = [
    Mode(Degrees(pipe=4), 4),
    Mode(Degrees(pipe=2, ulysses=2), 4),
    Mode(Degrees(pipe=2, ring=2), 2),
    Mode(Degrees(batch=2, pipe=2), 2),
    Mode(Degrees(ring=2, ulysses=2)),
    Mode(Degrees(tensor=2, ulysses=2)),
    Mode(Degrees(patch=2, ring=2, patch_mode="displaced")),
]


@pytest.mark.full
def test_products_too(pools, mini_file, once):
    pools.forget(4)
    what, file = tiny_workload(mini_file), mini.opened(mini_file, text=8)
    known = measure(pools(4), file, what, FOUR, "sdpa", lambda: None, lambda: None)
    for mode in FOUR:
        model, stats = real_run(pools, mini_file, known, mode, 4)
        check_run(known, predict(known, mode), stats, model, 4)
    pools.forget(4)


def test_seconds_are_of_the_right_size(examined):
    """No clock is asserted on: only that each figure is there, and that a run of more steps takes as much longer."""
    found = examined
    longer = dataclasses.replace(found.costs, workload=dataclasses.replace(found.costs.workload, steps=40))
    for prediction in found.predictions:
        assert math.isfinite(prediction.seconds)
        assert prediction.seconds > 0
        if prediction.mode.exact and prediction.mode.device is None:
            assert predict(longer, prediction.mode).seconds == pytest.approx(10 * prediction.seconds)
    text = describe_rehearsed(found)
    assert "links one way: 0-1" in text
    assert "double_blocks.0 (3 like it)" in text
    assert "single_blocks.0 (5 like it)" in text


def test_ranks_are_left_without_a_model(examined, pools, mini_file):
    pools.forget(2)
    model = pools.mini(mini_file, Degrees(ulysses=2))
    x, timestep, tensors = mini.inputs()
    expected = mini.reference(mini.load(mini_file), x, timestep, tensors)
    assert mini.relative(model.predict(ModelCall(x, timestep, tensors), lambda: None), expected) < 1e-5


def test_blocks_that_are_left_out_hand_on_what_they_get(pools, mini_file, mini_model):
    """The rest computes what a model without them would."""
    pools.forget(1)
    kept = ("double_blocks.1", "single_blocks.0", "single_blocks.4")
    model = on_ranks(pools(1), mini.opened(mini_file, text=8), Degrees(), "fp32", "sdpa", lambda: None, only=kept)
    shorter = mini.random_model()
    shorter.double_blocks = nn.ModuleList([shorter.double_blocks[1]])
    shorter.single_blocks = nn.ModuleList(shorter.single_blocks[index] for index in (0, 4))
    x, timestep, tensors = mini.inputs()
    out = model.predict(ModelCall(x, timestep, tensors), lambda: None)
    assert mini.relative(out, mini.reference(shorter, x, timestep, tensors)) < 1e-5
    assert mini.relative(out, mini.reference(mini_model, x, timestep, tensors)) > 1e-2
    stats = model.close_run(0, lambda: None)[0]
    assert set(stats.blocks) == set(kept)
    assert all(block.seconds > 0 for block in stats.blocks.values())
    held = [*shorter.double_blocks.parameters(), *shorter.single_blocks.parameters()]
    assert model.weight_bytes[0] < sum(p.nbytes for p in mini_model.parameters()) - sum(p.nbytes for p in held)


def test_cancel_ends_it(pools, mini_file):
    class Cancelled(BaseException):
        pass

    calls = 0

    def poll() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise Cancelled

    pools.forget(2)
    with pytest.raises(Cancelled):
        examine(pools(2), mini.opened(mini_file, text=8), tiny_workload(mini_file), "sdpa", lambda: None, poll)
    pools.end(2)  # as Registry.borrow does


CASES = all_cases()
DEFAULT = ("qwen-image-2.1", "wan-animate-2")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in DEFAULT else pytest.mark.full) for case in CASES],
)
def test_every_family_can_be_rehearsed(case, pools, tmp_path, once):
    """Whole and in bands; every kind of block is timed, and counted as often as there are such."""
    model = case.model()
    checkpoint = open_checkpoint(case.save(model, tmp_path / "model.safetensors"))
    what = workload_of(checkpoint, "fp32", "cpu", (1, *case.latent), 1, 4, 7)
    assert len(what.blocks) == checkpoint.family.blocks.total(checkpoint.config)
    assert what.sizes.weight_bytes == pytest.approx(sum(values.nbytes for values in model.state_dict().values()), rel=0.02)
    kinds = [CallKind(Degrees(), 1), CallKind(Degrees(), 1, bands=2, buffered=True, stale=True)]
    pools.forget(2)
    found = rehearse(pools(2), checkpoint, what, kinds, "sdpa", False, lambda: None, lambda: None)
    for call in found.values():
        assert set(call.first.blocks) == set(what.kept)
        assert all(seconds > 0 for times in call.first.blocks.values() for seconds in times)
    assert found[kinds[1]].other != found[kinds[1]].first  # a band of its own, with the keys of the other one


class FakePool:
    error = None

    def __init__(self, devices, self_test, **_settings):
        self.devices, self.closed, self.ready, self.cleared = devices, False, Future(), 0
        self.self_test, self.whole = self_test, self
        self.ready.set_result([])

    def clear(self, why):
        self.cleared += 1

    def close(self, politely):
        self.closed = True


def test_borrowed_ranks_lose_their_models_and_end_with_a_failure(monkeypatch):
    monkeypatch.setattr("parallel_backend.client.registry.Pool", FakePool)
    registry = Registry()
    with registry.borrow(("cpu", "cpu")) as pool:
        assert pool.cleared == 1
    assert pool.cleared == 2  # of what the borrower has left
    with registry.borrow(("cpu", "cpu")) as again:
        assert again is pool
    with registry.borrow(("cpu",)) as other:
        assert pool.closed
        assert not other.closed
    with pytest.raises(KeyboardInterrupt), registry.borrow(("cpu",)):
        raise KeyboardInterrupt
    assert other.closed
    with registry.borrow(("cpu",)) as new:
        assert new is not other


def test_a_video_latent_for_a_picture_model_is_refused(mini_file):
    with pytest.raises(ValueError, match="latent_image: the latent has 5 axes, this model needs 4"):
        workload_of(mini.opened(mini_file, text=8), "fp32", "cpu", (1, 16, 3, 16, 12), 1, 4, 8)


def test_a_banded_call_is_that_of_the_replica_with_most_entries():
    mode = Mode(Degrees(batch=2, pipe=2), 4)
    assert banded_call(mode, workload(entries=3)) == CallKind(Degrees(), 2, bands=4, buffered=True, stale=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(mini_file, once):
    """Two ranks share one: names, memory and activations are there, and a device's memory counts once."""
    with closing(Pool(("cuda:0", "cuda:0"))) as pool:
        found = examine(pool, mini.opened(mini_file, text=8), tiny_workload(mini_file), "auto", lambda: None, lambda: None)
    assert found.costs.machine.devices[0].kind == torch.cuda.get_device_name(0)
    assert not found.costs.machine.on_cpus
    assert all(memory.activations > 0 for prediction in found.predictions for memory in prediction.memory)
    assert f"{torch.cuda.get_device_name(0)}, " in describe_rehearsed(found)


def test_ranks_on_one_device_share_its_memory():
    device = Device("cuda:0", "GPU 1.0", 40 * GB, 40 * GB)
    on = dataclasses.replace(machine([1.0, 1.0]), devices=(device, device))
    found = predict(costs(workload(), on), Mode(Degrees(ulysses=2)))
    assert "needs 50.0 GB on cuda:0, which has 40.0 GB free" in found.lacks
