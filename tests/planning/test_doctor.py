"""Parallel Doctor: what it says of machines that are made up, against real runs, and what it rehearses on real ranks."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
import torch

from parallel_backend.client.registry import Registry
from parallel_backend.client.sampling import Prompt, linear_sigmas, sample_in_bands, sample_whole
from parallel_backend.core.degrees import AXES, Degrees
from parallel_backend.core.setup import Setup
from parallel_backend.own_class.built.built_class import StreamKeys
from parallel_backend.placement.links import SIZES, Link, Links, alike, fit
from parallel_backend.placement.model_sizes import ModelSizes
from parallel_backend.planning import rehearsal
from parallel_backend.planning.calibrated_costs import BlockCost, CalibratedCosts, Calibration, DeviceCost
from parallel_backend.planning.calibration import calibrate
from parallel_backend.planning.machine import Device, Machine
from parallel_backend.planning.modes import Mode, possible
from parallel_backend.planning.planner import Plan, plan
from parallel_backend.planning.prediction import cut_model, predict
from parallel_backend.planning.report import describe, settings, verdict
from parallel_backend.planning.workload import Workload, workload_of
from parallel_backend.processes.pool import DeviceFull, Pool
from testing import mini
from testing.models import on_ranks

pytestmark = pytest.mark.threads

GB = 10**9
NVLINK, PCIE, ETHERNET = Link(1e-5, 200e9), Link(2e-5, 12e9), Link(1e-4, 0.3e9)


def workload(heads: int = 24, count: int = 57, **changes) -> Workload:
    """Flux-dev at 1024 x 1024 in bf16, without its distillation: 57 blocks of one kind, 24 heads, two prompts."""
    sizes = ModelSizes(
        block_bytes=(400 * 10**6,) * count,
        ends=2 * 10**8,
        attention=((StreamKeys(True, (0,), 3072 // heads),),) * count,
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
    return Machine(tuple(devices), Links(alike(world, link)))


def costs(what: Workload, on: Machine) -> CalibratedCosts:
    """A block takes 20 ms for the whole picture on a GPU of speed 1."""
    speeds = [float(device.kind.removeprefix("GPU ")) for device in on.devices]
    of_devices = (
        DeviceCost({"blocks": BlockCost(1e-4, 0.02 / speed / what.tokens, 0.0)}, BlockCost(0.004, 0.0, 0.0))
        for speed in speeds
    )
    return CalibratedCosts(Calibration(on, tuple(of_devices), 0.002), what)


def test_a_line_through_transfers():
    link = fit([(size, 3e-5 + size / 5e9) for size in SIZES])
    assert (link.latency, link.bandwidth) == pytest.approx((3e-5, 5e9))
    noisy = fit([(1024, 5e-5), (1 << 16, 2e-5), (1 << 20, 2e-5), (1 << 23, 1e-5)])  # nonsense, as it may be measured
    assert noisy.bandwidth > 0
    assert 0 <= noisy.latency <= 5e-5


def on_cpus(on: Machine, host_free: int | None = None) -> Machine:
    """The same with CPU ranks."""
    return dataclasses.replace(on, devices=tuple(Device("cpu", device.kind) for device in on.devices), host_free=host_free)


def test_memory_of_cpu_ranks_is_shared():
    """The weights, 23 GB, are there once; what each rank computes with is its own."""
    enough, short = (costs(workload(), on_cpus(machine([1.0, 1.0]), free * GB)) for free in (26, 25))
    assert not predict(enough, Mode(Degrees(ulysses=2))).lacks
    assert "need 24.6 GB of host memory together, 25.0 GB is free" in predict(short, Mode(Degrees(ulysses=2))).lacks


def test_two_unequal_gpus():
    at = costs(workload(entries=1), machine([1.0, 0.5], PCIE))
    stages = cut_model(at, Mode(Degrees(pipe=2), 4)).stage_blocks
    assert len(stages[0]) == 38  # two thirds of 57
    found = plan(at)
    assert found.one_device.mode.device == 0
    assert found.best.mode.degrees == Degrees(patch=2, patch_mode="displaced")  # which shares by speed
    ulysses = next(p for p in found.predictions if p.mode.degrees == Degrees(ulysses=2))
    assert ulysses.seconds > found.one_device.seconds  # it waits for the slow one in every block
    assert "cuda:0" in describe(found)


def test_four_gpus_with_slow_links():
    found = plan(costs(workload(entries=1), machine([1.0] * 4, ETHERNET)))
    assert found.best.mode.degrees == Degrees(pipe=4)
    text = describe(found)
    assert f"num_pipeline_patch {found.best.mode.bands}" in text
    assert "the fastest that is exact throughout: one device (cuda:0)" in text
    assert "0-1 0.3 GB/s, 100 us" in text


def test_gpus_that_gain_nothing_stay_alone():
    """Links so slow that nothing pays, and a picture so small that patches do not either."""
    crawl = Link(0.5, 1e6)
    found = plan(costs(workload(entries=1), machine([1.0] * 2, crawl)))
    text = describe(found)
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
    text = describe(busy)
    assert "3.50x on 2 ranks is not credible" in text
    assert "Parallel DiT Loader: " not in text
    assert verdict(idle).startswith(f"advice: {idle.best.mode}, ") and verdict(idle).endswith(" x one device")
    assert not idle.doubt


def test_a_model_too_large_for_one_device_gets_a_pipeline_and_says_why():
    """23 GB of weights on cards of 20 GB with slow links; fast links would make it tensor parallel."""
    found = plan(costs(workload(entries=1), machine([1.0] * 2, ETHERNET, free=20 * GB)))
    assert found.best.mode.degrees == Degrees(pipe=2)
    text = describe(found)
    assert "no single device can run this model: one needs 23.6 GB on cuda:0, which has 20.0 GB free" in text
    assert re.search("ulysses_degree 2 [(]exact[)]; does not fit: needs 23.4 GB on cuda:[01], which has 20.0 GB free", text)


# On real ranks.


def tiny_workload(mini_file, entries: int = 2, steps: int = 4) -> Workload:
    what = workload_of(mini.opened(mini_file, text=8), "fp32", "cpu", (1, 16, 16, 12), entries, steps, 8)
    return dataclasses.replace(what, trials=mini.trials())


def calibrated(pool: Pool, mini_file) -> CalibratedCosts:
    return CalibratedCosts(calibrate(pool, mini.opened(mini_file, text=8), "fp32", lambda: None), tiny_workload(mini_file))


@pytest.fixture(scope="module")
def planned(pools, mini_file) -> Plan:
    pools.forget(2)
    found = plan(calibrated(pools(2), mini_file))
    pools.forget(2)
    return found


def real_run(pools, mini_file, known: CalibratedCosts, mode: Mode, steps: int):
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


def sent_in_a_step(axis: str, rank: int) -> float:
    """docs/modes.md for two entries of 48 image and 8 text tokens, 8 layers and two ranks: bytes in fp32."""
    hidden, layers = 2 * (48 + 8) * 128 * 4, 8
    gathered = hidden / 2  # what leaves the blocks, for the class's own epilogue
    keys = 2 * hidden * layers / 2 + gathered
    return {"ulysses": hidden * layers + gathered, "ring": keys, "patch": keys, "pipe": hidden * (rank == 0)}.get(axis, 0)


def check_run(prediction, stats, model, steps: int) -> None:
    """What each rank sent along each axis, and what it held. In a band without words each rank has a token in their place,
    which is not counted between stages."""
    mode = prediction.mode
    for rank, what in enumerate(stats):
        axes = [axis for axis in AXES if getattr(mode.degrees, axis) > 1]
        expected = {axis: steps * size for axis in axes if (size := sent_in_a_step(axis, rank))}
        sent = {axis: count for axis, count in what.bytes_sent.items() if axis != "tensor"}  # two sums a block are counted
        assert sent == (expected if mode.bands == 1 else pytest.approx(expected, rel=0.08))
        memory = prediction.memory[rank]
        assert model.weight_bytes[rank] == pytest.approx(memory.weights, rel=0.02)
        assert what.buffer_bytes == pytest.approx(memory.buffers, rel=0.01)


TWO = [mode for mode in possible(workload(grid=(8, 8)), 2)[0] if mode.bands < 8]


@pytest.mark.parametrize("mode", TWO, ids=str)
def test_traffic_weights_and_buffers_are_those_of_real_runs(planned, pools, mini_file, mode):
    model, stats = real_run(pools, mini_file, planned.costs, mode, 4)
    (prediction,) = (found for found in planned.predictions if found.mode == mode)
    check_run(prediction, stats, model, 4)
    pools.forget(2)


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    found = Registry()
    yield found
    found.close()


def rehearsed(found: Plan, mini_file, registry: Registry, monkeypatch, poll=lambda: None) -> tuple[Plan, list[Setup]]:
    """The plan with rehearsals of one short run each, and what was loaded for them."""
    monkeypatch.setattr(rehearsal, "RUNS", 1)
    checkpoint, setups = mini.opened(mini_file, text=8), []

    @contextmanager
    def load(setup, file, request, _poll):
        setups.append(setup)
        yield registry.model(setup, lambda: None, expected=lambda: request, opened=file)
        registry.unload(setup)

    setup = Setup(checkpoint.path, "fp32", ("cpu", "cpu"), Degrees(), "sdpa", own_class=checkpoint.built.own)
    return rehearsal.rehearse(found, setup, checkpoint, load, lambda _doing: poll, lambda: None), setups


@pytest.mark.processes
def test_the_best_three_and_one_device_are_rehearsed(planned, mini_file, registry, monkeypatch):
    found, setups = rehearsed(planned, mini_file, registry, monkeypatch)
    assert [each.mode for each in found.rehearsed] == [each.mode for each in planned.proposals]
    assert len({each.mode.degrees for each in found.rehearsed}) == len(found.rehearsed) in (3, 4)
    assert found.rehearsed[0].mode == planned.best.mode
    assert found.one_device in found.rehearsed
    assert [setup.degrees for setup in setups] == [each.mode.degrees for each in found.rehearsed]
    assert all(setup.degrees.world == len(setup.devices) for setup in setups)
    assert all(0 < each.seconds < math.inf for each in found.rehearsed)
    assert found.best in found.rehearsed
    text = describe(found)
    assert "planned seconds, rehearsed seconds, against one device" in text
    assert "links one way: 0-1" in text
    for each in found.rehearsed:
        planned_seconds = next(one.seconds for one in planned.predictions if one.mode == each.mode)
        assert f"{planned_seconds:9.2f} s{each.seconds:9.2f} s" in text


@pytest.mark.processes
def test_a_proposal_that_runs_out_of_memory_is_not_advised(planned, mini_file, registry, monkeypatch):
    def run_out(*_arguments):
        raise DeviceFull("rank 0 ran out of memory\nand more", 0, 1)

    monkeypatch.setattr(rehearsal, "_seconds", run_out)
    found, _ = rehearsed(planned, mini_file, registry, monkeypatch)
    assert found.best is None
    assert all(each.lacks == "rank 0 ran out of memory" for each in found.rehearsed)
    assert "does not fit: rank 0 ran out of memory" in describe(found)


def test_a_video_latent_for_a_picture_model_is_refused(mini_file):
    with pytest.raises(ValueError, match="latent_image: the latent has 5 axes, this model needs 4"):
        workload_of(mini.opened(mini_file, text=8), "fp32", "cpu", (1, 16, 3, 16, 12), 1, 4, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(mini_file):
    """Two ranks share one: its name and memory are there, and a device's memory counts once."""
    with closing(Pool(("cuda:0", "cuda:0"))) as pool:
        found = plan(calibrated(pool, mini_file))
    assert found.costs.machine.devices[0].kind == torch.cuda.get_device_name(0)
    assert not found.costs.machine.on_cpus
    assert f"{torch.cuda.get_device_name(0)}, " in describe(found)
