"""A cross-section of `python -m tests.campaigns.faults`; every kind in every phase in the full tier; and the harness finds
what is wrong.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from multiprocessing import shared_memory
from pathlib import Path
from unittest import mock

import pytest

from tests.campaigns.faults import census, orphans, report, table, trial
from tests.campaigns.faults.fault import Fault
from tests.campaigns.faults.session import FaultSession, fault_session

FACTOR = 4.0
"""Of all limits: these tests are about what comes, not when. The command has the limits that are promised."""
SILENCE, PATIENT = 4.0, 1.0

CROSS_SECTION = [
    Fault("exits", "os._exit(0)", "rendezvous", "pipe 2", 0, 0, 2),
    Fault("stopped", "by itself", "sending", "pipe 2", 1, 1, 3),
    Fault("raises", "RuntimeError", "start", "pipe 2", 1, 1, 5),
    Fault("raises", "RuntimeError", "probe", "patch 2", 0, 0, 6),
    Fault("transfer fails", "RuntimeError", "exact", "tensor 2", 1, 2, 7),
    Fault("out of memory", "torch", "loading", "batch 2", 1, 7, 8),
    Fault("NaN", "one value", "banded", "pipe 2", 1, 3, 10),
    Fault("slow", "once", "conditioning", "pipe 2", 0, 0, 11),
    Fault("slow", "for long", "exact", "pipe 2", 1, 2, 12),
    Fault("output nobody asked for", "of long ago", "decoding", "pipe 2", 0, 3, 13),
    Fault("hangs", "in Python", "adapt", "pipe 2", 1, 3, 14),
    Fault("transfer lost", "not sent", "banded", "pipe 2", 0, 1, 15),
    Fault("exits", "sys.exit(3)", "close run", "patch 2", 1, 0, 16),
    Fault("crashes", "segfault", "unload", "pipe 2", 1, 0, 17),
    Fault("crashes", "abort", "closing", "pipe 2", 0, 0, 18),
    Fault("cut off", "rank says nothing more", "idle", "pipe 2", 1, 0, 19),
    Fault("client's end cut off", "both ways", "banded", "ulysses 2", 0, 3, 20),
    Fault("garbage from a rank", "length", "idle", "pipe 2", 0, 0, 22),
    Fault("output of the wrong shape", "one value", "banded", "ulysses 2", 1, 3, 23),
    Fault("garbage to a rank", "nonsense", "loading", "pipe 2", 0, 4, 24),
    Fault("model file", "cut short", "loading", "pipe 2", 0, 0, 25),
    Fault("model file while it is read", "cut short", "loading", "pipe 2", 1, 2, 27),
    Fault("store file", "gone", "rendezvous", "pipe 2", 1, 0, 26),
    Fault("killed", "by itself", "copying", "ulysses 2, streamed", 1, 5, 28),
    Fault("no host memory", "none is free", "giving way", "pipe 2, giving way", 0, 0, 29),
    Fault("model file while it is streamed", "replaced", "giving way", "pipe 2, giving way", 1, 0, 30),
    Fault("cancelled", "unloads", "decoding", "pipe 2", 0, 3, 31),
]
FURTHER = [
    Fault("killed", "by itself", "exact", "ulysses 2", 1, 3, 0),
    Fault("killed", "from outside", "banded", "pipe 2", 0, 4, 1),
    Fault("stopped", "from outside", "idle", "pipe 2", 0, 0, 4),
    Fault("out of memory", "real", "banded", "ring 2", 0, 5, 9),
    Fault("garbage from a rank", "cut short", "exact", "pipe 2", 1, 2, 21),
]
"""Of kinds and phases that others above have."""
REST = FURTHER + [fault for fault in table.choose(180, seed=1) if str(fault) not in map(str, (*CROSS_SECTION, *FURTHER))]
"""Every kind in each of its phases, and every variant."""
ORPHANS = (("exact", "hangs"), ("start", "works"), ("banded", "stopped"))
"""Phase and variant. Beside the two of test_failures.py, which the default tier has: with and without a run."""


@pytest.fixture(scope="module")
def broken_ranks(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # pytest's own, before temporary files go elsewhere
    with fault_session(SILENCE) as made, mock.patch.object(trial, "PATIENT", PATIENT):
        yield made


@pytest.mark.processes
@pytest.mark.parametrize(
    "fault", [*CROSS_SECTION, *(pytest.param(fault, marks=pytest.mark.full) for fault in REST)], ids=str
)
def test_a_fault_ends_as_it_should(broken_ranks, fault, measured):
    verdict = trial.try_out(broken_ranks, fault, FACTOR)
    if verdict.seconds is not None and verdict.error is not None:
        measured(f"seconds from fault to error, {fault.kind}", verdict.seconds)
    assert not verdict.problems, f"{verdict.problems}\n{verdict.error}"


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [fault for fault in orphans.all_faults(0) if (fault.phase, fault.variant) in ORPHANS], ids=str
)
def test_ranks_end_with_their_client(fault):
    verdict = orphans.try_out(fault, FACTOR)
    assert not verdict.problems, verdict.problems


def test_the_cross_section_has_every_kind_and_every_phase():
    assert {fault.kind for fault in CROSS_SECTION} == set(table.KINDS)
    assert {fault.phase for fault in CROSS_SECTION} == set(table.EVENTS)
    for fault in CROSS_SECTION:
        assert table.makes_sense(fault.kind, fault.variant, fault.phase, fault.degrees, fault.victim), str(fault)
        assert fault.phase in table.KINDS[fault.kind].phases
        assert fault.moment in table.moments(fault.kind, fault.phase)


def test_the_rest_has_every_kind_in_each_of_its_phases():
    pairs = {(name, phase) for name, kind in table.KINDS.items() for phase in kind.phases}
    assert {(fault.kind, fault.phase) for fault in (*CROSS_SECTION, *REST)} == pairs


def test_a_choice_has_every_kind_in_each_of_its_phases_and_every_variant():
    chosen = table.choose(200, seed=3)
    assert len(chosen) == 200
    assert chosen == table.choose(200, seed=3) != table.choose(200, seed=4)
    assert {(f.kind, f.phase) for f in chosen} == {
        (name, phase) for name, kind in table.KINDS.items() for phase in kind.phases
    }
    assert {(f.kind, f.variant) for f in chosen} == {
        (name, variant) for name, kind in table.KINDS.items() for variant in kind.says
    }
    assert {f.degrees for f in chosen} == set(table.DEGREES)
    assert {f.kind for f in table.choose(9, 0, ["slow"])} == {"slow"}


@pytest.mark.processes
class TestControls:
    """Ranks that do not do what they should, to see that the harness says so."""

    def problems(self, broken_ranks: FaultSession, fault: Fault, ending: str) -> str:
        kind = table.Kind({"": r"rank {victim} \(cpu\)"}, (fault.phase,), ending=ending)
        return "\n".join(trial.try_out(broken_ranks, fault, FACTOR, kind).problems)

    def test_a_fault_that_is_swallowed_gives_no_error(self, broken_ranks):
        fault = Fault("swallowed", "", "exact", "pipe 2", 1, 2, 0)
        assert self.problems(broken_ranks, fault, table.ERROR) == "no error, and the result is right"

    def test_a_wrong_result_is_seen(self, broken_ranks):
        fault = Fault("wrong", "", "banded", "pipe 2", 1, 2, 0)
        assert self.problems(broken_ranks, fault, table.RIGHT) == "no error, and the result is wrong"
        assert self.problems(broken_ranks, fault, table.ERROR) == "no error, and the result is wrong"

    def test_a_rank_that_stays_wrong_is_seen(self, broken_ranks):
        fault = Fault("stays wrong", "", "exact", "pipe 2", 0, 2, 0)
        try:
            assert "the next prompt's result is wrong" in self.problems(broken_ranks, fault, table.RIGHT)
        finally:
            broken_ranks.registry.close()

    def test_a_fault_that_does_not_strike_is_no_success(self, broken_ranks):
        fault = Fault("swallowed", "", "exact", "pipe 2", 1, 10**6, 0)
        assert "the fault did not strike" in self.problems(broken_ranks, fault, table.RIGHT)

    def test_an_error_that_names_another_rank_or_comes_late_is_seen(self, broken_ranks, monkeypatch):
        fault = Fault("killed", "by itself", "exact", "pipe 2", 1, 2, 0)
        kind = table.Kind({"by itself": r"rank 0 \(cpu\) was killed"}, table.COMPUTING)
        monkeypatch.setattr(trial, "LIMIT", 0.0)
        monkeypatch.setattr(trial, "SETTLE", FACTOR * 5.0)
        problems = "\n".join(trial.try_out(broken_ranks, fault, FACTOR, kind).problems)
        assert "the error does not say" in problems
        assert "where 0.0 s are allowed" in problems
        assert "left over" not in problems


@contextlib.contextmanager
def process(_folder: Path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child.pid
    finally:
        child.communicate()


@contextlib.contextmanager
def thread(_folder: Path):
    end = threading.Event()
    started = threading.Thread(target=end.wait, name="left alone")
    started.start()
    yield
    end.set()
    started.join()


@contextlib.contextmanager
def descriptor(_folder: Path):
    with open(os.devnull, "rb"):
        yield


@contextlib.contextmanager
def listener(_folder: Path):
    with socket.create_server(("127.0.0.1", 0)):
        yield


@contextlib.contextmanager
def file(folder: Path):
    (folder / "parallel-dit-left").mkdir()
    yield
    (folder / "parallel-dit-left").rmdir()


@contextlib.contextmanager
def segment(_folder: Path):
    shared = shared_memory.SharedMemory(create=True, size=64)
    yield
    shared.close()
    shared.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "word"),
    [
        (process, "processes"),
        (thread, "threads"),
        (descriptor, "open files"),
        (listener, "listening sockets"),
        (file, "temporary files"),
        (segment, "shared memory"),
    ],
)
@pytest.mark.parametrize("exchanged", [Counter(), Counter(children=2, files=1)], ids=["nothing new", "new ranks"])
def test_whatever_is_left_over_is_seen(leave, word, exchanged, tmp_path):
    if leave is segment and not census.SHARED_MEMORY.exists():
        pytest.skip("no folder shows shared memory here")
    shared_memory.SharedMemory(create=True, size=64).unlink()  # starts multiprocessing's own helper
    before = census.take(tmp_path)
    assert census.left_over(before, census.take(tmp_path), exchanged) == []
    with leave(tmp_path):
        found = census.left_over(before, census.take(tmp_path), exchanged)
    assert any(what.startswith(word) or word in what for what in found), found
    assert census.settle(lambda: census.left_over(before, census.take(tmp_path), exchanged), 5.0) == []


def test_a_process_that_stays_is_seen():
    with process(Path()) as child:
        assert census.wait_until_gone([child], 0.1) == [child]
    assert census.wait_until_gone([child], 5.0) == []


def test_the_report_counts_and_lists_failures():
    fault = FURTHER[0]
    verdicts = [trial.Verdict(fault, 0.5, "RankError: it\nwas"), trial.Verdict(fault, 2.5, "RankError: it", ["too late"])]
    found = report.as_json(verdicts)
    killed = {"faults": 2, "failed": 1, "median_seconds": 1.5, "worst_seconds": 2.5}
    assert found["kinds"] == {"killed": killed}
    assert found["phases"] == {"exact": 2}
    assert [one["error"] for one in found["all"]] == ["RankError: it", "RankError: it"]
    assert report.failures(verdicts).splitlines()[:2] == [f"FAILED {fault}", "too late"]
    assert report.table(verdicts, ["exact"]).splitlines()[1].split() == ["killed", "2", "2", "1.50", "2.50"]
