"""A few faults of `python -m tests.campaigns.faults`; every kind in each of its phases in the full tier."""

from unittest import mock

import pytest

from tests.campaigns.faults import table, trial
from tests.campaigns.faults.fault import Fault
from tests.campaigns.faults.session import fault_session

FACTOR = 4.0
"""Of all limits: these tests are about what comes, not when. The command has the limits that are promised."""
SILENCE, PATIENT = 4.0, 1.0

FEW = [
    Fault("killed", "by itself", "banded", "pipe 2", 0, 4),
    Fault("stopped", "by itself", "exact", "pipe 2", 1, 3),
    Fault("out of memory", "torch", "loading", "batch 2", 1, 7),
    Fault("hangs", "in Python", "adapt", "pipe 2", 1, 3),
    Fault("NaN", "one value", "banded", "pipe 2", 1, 3),
    Fault("model file while it is read", "cut short", "loading", "pipe 2", 1, 2),
    Fault("cancelled", "unloads", "decoding", "pipe 2", 0, 0),
]
PAIRS = {(name, phase) for name, kind in table.KINDS.items() for phase in kind.phases if phase not in table.STREAMING}
MANY = [fault for fault in table.choose(len(PAIRS), seed=1) if str(fault) not in map(str, FEW)]


@pytest.fixture(scope="module")
def broken_ranks(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # pytest's own, before temporary files go elsewhere
    with fault_session(SILENCE) as made, mock.patch.object(trial, "PATIENT", PATIENT):
        yield made


@pytest.mark.processes
@pytest.mark.parametrize("fault", [*FEW, *(pytest.param(fault, marks=pytest.mark.full) for fault in MANY)], ids=str)
def test_a_fault_ends_as_it_should(broken_ranks, fault):
    verdict = trial.try_out(broken_ranks, fault, FACTOR)
    assert not verdict.problems, f"{verdict.problems}\n{verdict.error}"
