"""A few faults of `python -m tests.campaigns.faults`; every kind in each of its phases in the full tier."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.campaigns.faults import table, trial
from tests.campaigns.faults.fault import Fault
from tests.campaigns.faults.session import fault_session

FACTOR = 4.0
"""Of all limits: these tests are about what comes, not when. The command has the limits that are promised."""
SILENCE, PATIENT = 4.0, 1.0

FEW = [
    Fault("killed", "by itself", "banded", "pipe 2", 0, 4),
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
def test_a_fault_ends_as_it_should(broken_ranks, fault, measured):
    verdict = trial.try_out(broken_ranks, fault, FACTOR)
    if verdict.seconds is not None and verdict.error is not None:
        measured(f"seconds from fault to error, {fault.kind}", verdict.seconds)
    assert not verdict.problems, f"{verdict.problems}\n{verdict.error}"


def test_a_choice_has_every_kind_in_each_of_its_phases():
    chosen = table.choose(200, seed=3)
    assert len(chosen) == 200
    assert chosen == table.choose(200, seed=3) != table.choose(200, seed=4)
    assert {(fault.kind, fault.phase) for fault in chosen} == PAIRS


@pytest.mark.processes
@pytest.mark.full
def test_a_wrong_result_is_seen(broken_ranks):
    """A control: a rank that moves one block's output."""
    kind = table.Kind({"": r"rank {victim} \(cpu\)"}, ("banded",), ending=table.RIGHT)
    fault = Fault("wrong", "", "banded", "pipe 2", 1, 2)
    assert trial.try_out(broken_ranks, fault, FACTOR, kind).problems == ["no error, and the result is wrong"]


CLIENT = """
from parallel_backend.processes.pool import Pool
if __name__ == "__main__":
    pool = Pool(("cpu", "cpu"))
    print(*pool.pids, flush=True)
    pool.ready.result()
    print("ready", flush=True)
    input()
"""


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("stopped", [False, True], ids=["while they start", "while one is stopped"])
def test_ranks_end_with_their_client(stopped, tmp_path):
    (script := tmp_path / "client.py").write_text(CLIENT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        ranks = [psutil.Process(int(pid)) for pid in client.stdout.readline().split()]
        if stopped:
            assert client.stdout.readline() == "ready\n"
            ranks[1].send_signal(signal.SIGSTOP)
        client.kill()
    assert len(ranks) == 2
    assert not psutil.wait_procs(ranks, timeout=FACTOR * trial.LIMIT)[1]
