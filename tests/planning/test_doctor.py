"""Parallel Doctor: what it works out from measurements, by hand and against real runs, and what it says."""

import dataclasses
import math
import re
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.validate import check_model
from parallel_backend.families.base.blocks import JOINT
from parallel_backend.placement.links import SIZES, Link, Links, alike, fit
from parallel_backend.placement.model_sizes import ModelSizes
from parallel_backend.planning.doctor import examine
from parallel_backend.planning.machine import Device, Machine
from parallel_backend.planning.modes import Mode, possible
from parallel_backend.planning.planner import plan
from parallel_backend.planning.prediction import AROUND, StepCost, cut_model, predict, step_bytes
from parallel_backend.planning.rehearsal import CallKind, Rehearsed, rehearse
from parallel_backend.planning.rehearsed_costs import RehearsedCosts, banded_call, needed
from parallel_backend.planning.report import compare, describe_rehearsed, settings, verdict
from parallel_backend.planning.workload import Workload, workload_of
from parallel_backend.processes.pool import Pool
from testing import mini
from testing.cases import all_cases
from testing.models import on_ranks

pytestmark = pytest.mark.threads

GB = 10**9
NVLINK, PCIE, ETHERNET = Link(1e-5, 200e9), Link(2e-5, 12e9), Link(1e-4, 0.3e9)


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


def test_a_line_through_transfers():
    link = fit([(size, 3e-5 + size / 5e9) for size in SIZES])
    assert (link.latency, link.bandwidth) == pytest.approx((3e-5, 5e9))
    noisy = fit([(1024, 5e-5), (1 << 16, 2e-5), (1 << 20, 2e-5), (1 << 23, 1e-5)])  # nonsense, as it may be measured
    assert noisy.bandwidth > 0
    assert 0 <= noisy.latency <= 5e-5


def on_cpus(on: Machine, host_free: int | None = None) -> Machine:
    """The same with CPU ranks."""
    return dataclasses.replace(on, devices=tuple(Device("cpu", device.kind) for device in on.devices), host_free=host_free)


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


def test_a_model_too_large_for_one_device_gets_a_pipeline_and_says_why():
    """23 GB of weights on cards of 20 GB with slow links; fast links would make it tensor parallel."""
    found = plan(costs(workload(entries=1), machine([1.0] * 2, ETHERNET, free=20 * GB)))
    assert found.best.mode.degrees == Degrees(pipe=2)
    text = describe_rehearsed(found)
    assert "no single device can run this model: one needs 25.0 GB on cuda:0, which has 20.0 GB free" in text
    assert re.search("ulysses_degree 2 [(]exact[)]; does not fit: needs 25.0 GB on cuda:[01], which has 20.0 GB free", text)


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


def test_a_family_can_be_rehearsed(pools, tmp_path, once):
    """Whole and in bands; every kind of block is timed, and counted as often as there are such."""
    case = next(case for case in all_cases() if case.name == "wan-2.2-animate")
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


def test_a_video_latent_for_a_picture_model_is_refused(mini_file):
    with pytest.raises(ValueError, match="latent_image: the latent has 5 axes, this model needs 4"):
        workload_of(mini.opened(mini_file, text=8), "fp32", "cpu", (1, 16, 3, 16, 12), 1, 4, 8)


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
