"""Ranks on cards that are killed, fail or run out of memory, and prompts that are cancelled, in every phase of a prompt.

The harness is that of tests/campaigns/faults. On emulated cards alone: results are those of CPU ranks bit for bit, the next
prompt's too, nothing is noted of the cards, and Unload leaves nothing on them and no registered host memory.
"""

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.campaigns.faults import table, trial
from tests.campaigns.faults.fault import Fault
from tests.campaigns.faults.session import FaultSession, fault_session
from tests.support.emulated_gpu.host import page_locked
from tests.support.emulated_gpu.machine import machine

pytestmark = pytest.mark.gpu

FACTOR, SILENCE, PATIENT = 4.0, 4.0, 1.0
"""As in tests/campaigns/test_faults.py."""
PHASES = {
    "start": "ulysses 2",
    "rendezvous": "ulysses 2",
    "loading": "tensor 2",
    "conditioning": "pipe 2",
    "exact": "ulysses 2",
    "banded": "pipe 2",
    "idle": "pipe 2",
    "adapt": "ulysses 2",
    "close run": "pipe 2",
    "decoding": "pipe 2",
    "unload": "pipe 2",
    "closing": "pipe 2",
    "giving way": "pipe 2, giving way",
    "copying": "pipe 2, streamed",
}
"""Phase -> the degrees that it is tried with. `copying` is a block's way from host memory."""
DEFAULT = ("killed (by itself), exact",)


def of_all() -> Iterator[pytest.param]:
    for kind, variants in {
        "killed": ("by itself",),
        "out of memory": ("torch",),
        "raises": ("RuntimeError",),
        "cancelled": ("goes on", "unloads"),
    }.items():
        for variant in variants:
            for phase, degrees in PHASES.items():
                if phase not in table.KINDS[kind].phases:
                    continue
                moment = min(2, table.moments(kind, phase)[-1])
                name = f"{kind} ({variant}), {phase}"
                fault = Fault(kind, variant, phase, degrees, 1, moment)
                yield pytest.param(fault, id=name, marks=() if name in DEFAULT else pytest.mark.full)


@pytest.fixture(scope="module")
def broken_ranks(request, tmp_path_factory) -> Iterator[FaultSession]:
    if not request.config.getoption("emulated_gpus"):
        pytest.skip("needs emulated cards, of which all is known")
    tmp_path_factory.getbasetemp()  # pytest's own, before temporary files go elsewhere
    with fault_session(SILENCE, cards=True) as made, mock.patch.object(trial, "PATIENT", PATIENT):
        yield made


@pytest.mark.parametrize("fault", of_all())
def test_a_fault_ends_as_it_should(broken_ranks: FaultSession, fault: Fault):
    verdict = trial.try_out(broken_ranks, fault, FACTOR)
    assert not verdict.problems, f"{verdict.problems}\n{verdict.error}"
    broken_ranks.unload()
    assert not any(of.reserved for of in machine.gpus) and not page_locked.registered  # nor has the client's own process
