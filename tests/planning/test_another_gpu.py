"""Parallel Doctor's `another_gpu`: known GPUs, their stated errors, and plans with a GPU that is not there."""

import statistics
from dataclasses import replace

import pytest

from benchmarks.predictions.pairs import GEFORCE
from benchmarks.predictions.presets import HARDWARE, MODELS
from benchmarks.predictions.published import left_out
from parallel_backend.core.setup import ALLOWED
from parallel_backend.planning.another_gpu import CHOICES, plans, with_another
from parallel_backend.planning.calibrated_costs import CalibratedCosts
from parallel_backend.planning.known_gpus import KNOWN, PAIRS_OFF, RUNS_OFF, known_gpu
from parallel_backend.planning.planner import Plan, plan
from parallel_backend.planning.report import describe_another, verdict_on_another

MODEL = MODELS["z-image"]
AGAIN = CHOICES["the same GPU again, PCIe x8"]


def one(card: str, kind: str = "NVIDIA GeForce {}", size: int = 1024) -> CalibratedCosts:
    """One such GPU, as a calibration finds it, and Z-Image."""
    calibration = HARDWARE[card].calibration(1, MODEL)
    machine = calibration.machine
    device = replace(machine.devices[0], kind=kind.format(card), total=machine.devices[0].memory)
    calibration = replace(calibration, machine=replace(machine, devices=(device,)))
    return CalibratedCosts(calibration, MODEL.workload("z-image", size, size, 20))


def compared(costs: CalibratedCosts, choice: str) -> tuple[Plan, Plan]:
    return plans(plan(costs), with_another(costs, CHOICES[choice]), ALLOWED)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX 2000 Ada Generation", "RTX 2000 Ada"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", None),
    ],
)
def test_gpus_are_known_by_torchs_name(kind, name):
    assert known_gpu(kind) is (KNOWN[name] if name else None)


def test_the_same_gpu_again_is_two_of_the_board():
    """The published runs' model of two RTX 4090 on 8 lanes each."""
    _, found = compared(one("RTX 4090"), str(AGAIN))
    board = plan(CalibratedCosts(HARDWARE["RTX 4090"].calibration(2, MODEL), one("RTX 4090").workload))
    assert {each.mode: each.seconds for each in found.predictions} == pytest.approx(
        {each.mode: each.seconds for each in board.predictions}
    )
    assert found.best.mode.degrees.world == 2


def test_another_kind_of_gpu_has_its_own_speed_memory_and_slot():
    costs = with_another(one("RTX 4090"), CHOICES["RTX 3090 24 GB, PCIe x4"])
    assert costs.calibration.costs[1].blocks["blocks"].whole(4352) == pytest.approx(
        MODEL.block(HARDWARE["RTX 3090"]).whole(4352)
    )
    assert costs.machine.links.link(0, 1).bandwidth == HARDWARE["RTX 3090"].link.bandwidth / 2
    assert costs.machine.devices[1].memory < costs.machine.devices[1].total == 24e9


def test_seconds_are_at_the_pace_of_the_rehearsal():
    costs = one("RTX 4090")
    found = plan(costs)
    alone = found.one_device
    rehearsed = replace(found, rehearsed=(replace(alone, seconds=2 * alone.seconds),))
    today, more = plans(rehearsed, with_another(costs, AGAIN), ALLOWED)
    hops = costs.workload.steps * costs.calibration.hop
    assert today.one_device.seconds - hops == pytest.approx(2 * (alone.seconds - hops), rel=0.01)
    assert more.one_device.seconds == today.one_device.seconds


def test_the_answer_says_gain_no_gain_and_what_does_not_fit():
    gain = compared(one("RTX 3090"), "RTX 5090 32 GB, PCIe x8")
    assert " s a step, " in verdict_on_another(*gain) and verdict_on_another(*gain).endswith(" x without it")
    none = compared(one("RTX 4090", size=256), "RTX 3060 12 GB, PCIe x4")
    assert verdict_on_another(*none) == "with RTX 3060 12 GB, PCIe x4, predicted: no gain"
    costs = one("RTX 4090")
    device = replace(costs.machine.devices[0], memory=10**9, copies=0.0)  # 1 GB, and nothing can be streamed
    machine = replace(costs.machine, devices=(device,))
    full = compared(replace(costs, calibration=replace(costs.calibration, machine=machine)), "RTX 5090 32 GB, PCIe x8")
    assert verdict_on_another(*full).endswith(" s a step, without it nothing fits")
    assert "does not fit: needs" in describe_another(*full)


@pytest.mark.parametrize("kind", ["x86_64", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_a_device_of_unknown_speed_is_compared_with_itself_alone(kind):
    costs = one("RTX 4090", kind)
    with pytest.raises(ValueError, match=r"another_gpu: the speed of cuda:0 .* relative to other GPUs is not known"):
        with_another(costs, CHOICES["RTX 3090 24 GB, PCIe x8"])
    assert with_another(costs, AGAIN).calibration.costs[1] == costs.calibration.costs[0]


def test_the_stated_error_of_speeds_is_that_of_published_pairs():
    errors = [100 * abs(pair.off) for pair in GEFORCE]
    assert (round(statistics.median(errors)), round(max(errors))) == PAIRS_OFF


@pytest.mark.full
def test_the_stated_error_of_seconds_is_that_of_published_runs():
    errors = [100 * abs(seconds / run.seconds - 1) for run, seconds in left_out().items()]
    assert (round(statistics.median(errors)), round(max(errors))) == RUNS_OFF
