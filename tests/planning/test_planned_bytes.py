"""The bytes that the planner expects ranks to send for a block are those that they do, whatever attention it has."""

import pytest

from parallel_backend.checkpoints.checkpoint import open_checkpoint
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.links import Links
from parallel_backend.planning.calibrated_costs import CalibratedCosts, Calibration
from parallel_backend.planning.machine import Machine
from parallel_backend.planning.modes import Mode
from parallel_backend.planning.rehearsal import rehearse
from parallel_backend.planning.rehearsed_costs import banded_call, exact_call
from parallel_backend.planning.workload import workload_of
from testing.cases import all_cases

pytestmark = pytest.mark.threads

TEXT = 8
NO_MACHINE = Calibration(Machine((), Links({})), ())
MODES = {
    "qwen-image-2.1": [Degrees(ring=2)],
    "wan-animate-2": [Degrees(ulysses=2)],  # twice as wide between blocks as in its attention
}


@pytest.mark.parametrize(
    ("case", "degrees"),
    [(case, degrees) for case in all_cases() for degrees in MODES.get(case.name, ())],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_block_sends_what_is_expected(case, degrees, pools, tmp_path, monkeypatch):
    monkeypatch.setattr("parallel_backend.planning.rehearsal.REPEATS", (1, 1))
    checkpoint, mode = open_checkpoint(case.save(case.model(), tmp_path / "model.safetensors")), Mode(degrees)
    what = workload_of(checkpoint, "fp32", "cpu", (1, *case.latent), 1, 4, TEXT)
    pools.forget(degrees.world)
    calls = {call(mode, what): call is exact_call for call in ((exact_call,) if mode.exact else (exact_call, banded_call))}
    found = rehearse(pools(degrees.world), checkpoint, what, list(calls), "sdpa", False, lambda: None, lambda: None)
    for call, exact in calls.items():
        expected = CalibratedCosts(NO_MACHINE, what).sent(mode, exact)
        for block, axes in expected.items():  # over all ranks: some have a token more
            sent = {axis: sum(counts) for axis, counts in found[call].sent[block].items()}
            assert sent == {axis: sum(counts) for axis, counts in axes.items()}
