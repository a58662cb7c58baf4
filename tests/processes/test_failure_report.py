"""Which rank an error names: the one at fault, whoever is heard of first."""

import pytest

from parallel_backend.processes import failure_report
from parallel_backend.processes.failure_report import DeviceFull, FailureReport, LinksDown, RankError, RankLost, again
from parallel_backend.processes.failure_text import FILE_GONE
from parallel_backend.processes.watchdog import Verdict
from parallel_backend.wire import messages as m


class Ranks:
    """Three, some of which have ended."""

    names = ("cpu", "cuda:0", "cuda:1")
    logs = None

    def __init__(self, **ended: str):
        self.ended = {int(name[1:]): how for name, how in ended.items()}

    def how_ended(self, rank: int) -> str | None:
        return self.ended.get(rank)

    def log_tail(self, rank: int) -> str:
        return f"log of {rank}"


@pytest.fixture
def at_once(monkeypatch):
    """The time in which another rank may explain more is over."""
    monkeypatch.setattr(failure_report, "ROOT_CAUSE_SECONDS", -1.0)


def report(ranks: Ranks) -> FailureReport:
    return FailureReport(ranks, lambda rank: f"micro-step {rank}")


def failure(rank: int, peer: bool = False) -> m.Failure:
    return m.Failure(rank, f"micro-step {rank}", peer, f"ValueError: of {rank}", f"traceback of {rank}")


def test_an_error_of_its_own_is_that_ranks_though_others_lost_their_peer_before():
    found = report(Ranks(r0="ended with exit code 1"))
    assert not found.pending
    found.note_failure(failure(0, peer=True))
    assert found.pending
    assert found.root_cause() is None  # another may explain more
    found.note_failure(failure(2))
    text = str(found.root_cause())
    assert text.startswith("Parallel DiT: rank 2 (cuda:1) failed in micro-step 2: ValueError: of 2\ntraceback of 2")


def test_a_rank_that_died_unheard_is_named_with_its_log():
    found = report(Ranks(r1="was killed by signal 9"))
    found.note_failure(failure(0, peer=True))
    found.note_cut_off(1)
    text = str(found.root_cause())
    assert text.startswith("Parallel DiT: rank 1 (cuda:0) was killed by signal 9, last seen in micro-step 1.")
    assert "log of 1" in text


@pytest.mark.parametrize(
    ("summary", "kind"),
    [
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", RankLost),
        ("RuntimeError: HIP error: unspecified launch failure", RankLost),
        ("RuntimeError: CUDA error: device-side assert triggered", RankError),
        ("RuntimeError: CUDA error: out of memory", DeviceFull),
        ("RuntimeError: shapes differ", RankError),
    ],
)
def test_a_run_goes_on_after_a_lost_device_and_not_after_an_error_that_would_come_again(summary, kind):
    found = report(Ranks())
    found.note_failure(m.Failure(2, "micro-step 3", False, summary, ""))
    error = found.root_cause()
    assert type(error) is kind
    assert kind is not RankLost or (error.devices, error.did) == (("cuda:1",), "failed")


@pytest.mark.parametrize(("how", "is_lost"), [("was killed by signal 9", True), (FILE_GONE, False)])
def test_a_rank_that_died_is_lost_unless_its_file_is_damaged(how, is_lost):
    found = report(Ranks(r1=how))
    found.note_cut_off(1)
    error = again(found.root_cause())
    assert isinstance(error, RankLost) == is_lost
    assert not is_lost or (error.devices, error.did) == (("cuda:0",), "died")


@pytest.mark.parametrize(("ranks", "devices"), [((2,), ("cuda:1",)), ((0, 1, 2), ())])
def test_ranks_that_hang_are_at_fault_unless_all_do(ranks, devices):
    error = report(Ranks()).hang(Verdict(ranks, "made no progress", hung=True))
    assert isinstance(error, RankLost)
    assert (error.devices, error.did) == (devices, "did not answer")


def test_who_says_why_is_named_before_who_died_of_it():
    found = report(Ranks(r1="was killed by signal 9"))
    found.note_failure(failure(2))
    found.note_cut_off(1)
    assert "rank 2" in str(found.root_cause()).splitlines()[0]


def test_where_nothing_else_is_known_the_rank_that_lost_its_peer_is_named(at_once):
    found = report(Ranks())
    found.note_failure(failure(1, peer=True))
    assert str(found.root_cause()).startswith("Parallel DiT: rank 1 (cuda:0) lost its peer: ValueError: of 1")


def test_links_that_failed_are_told_by_all_their_ends_unless_a_rank_died(at_once):
    def links(rank: int) -> m.Failure:
        return m.Failure(rank, "loading", True, f"the link of {rank} did not end. Try: something", "traceback", "nccl")

    found = report(Ranks())
    found.note_failure(links(1))
    found.note_failure(links(2))
    error = found.root_cause()
    assert isinstance(error, LinksDown) and again(error).backend == error.backend == "nccl"
    first, second, *_ = str(error).splitlines()
    assert first == "Parallel DiT: rank 1 (cuda:0): the link of 1 did not end. Try: something"
    assert second == "rank 2 (cuda:1): the link of 2 did not end. Try: something"
    assert "log of 1" in str(error)
    found = report(Ranks(r0="was killed by signal 9"))
    found.note_failure(links(1))
    assert str(found.root_cause()).startswith("Parallel DiT: rank 0 (cpu) was killed by signal 9")
