"""The thread beside what may block for ever."""

import queue
import time

import pytest

from parallel_backend.rank.comm import guard as guard_module
from parallel_backend.rank.comm.guard import Guard
from parallel_backend.rank.comm.rendezvous import StoreError
from parallel_backend.wire.heartbeat import Heartbeat


class Gone:
    """What the ranks meet through. `error`: why it is gone, None while it is there."""

    error: Exception | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def gone(monkeypatch):
    monkeypatch.setattr(guard_module, "LOOK_SECONDS", 0.01)
    return Gone()


def make(gone: Gone) -> tuple[Guard, Heartbeat, queue.SimpleQueue]:
    heartbeat, ends = Heartbeat(), queue.SimpleQueue()
    return Guard(heartbeat, gone.check, ends.put), heartbeat, ends


def test_what_takes_too_long_ends_the_rank(gone):
    guard, heartbeat, ends = make(gone)
    with guard.waiting(0.05, lambda: TimeoutError("the link")):
        assert heartbeat.waiting
        assert str(ends.get(timeout=10)) == "the link"
    assert not heartbeat.waiting


def test_what_ends_in_time_does_not_nor_does_what_has_no_limit(gone):
    guard, _, ends = make(gone)
    with guard.waiting(0.2):
        pass
    with guard.waiting():
        time.sleep(0.3)
    assert ends.empty()


def test_a_store_that_goes_away_ends_the_rank_while_it_waits(gone):
    guard, _, ends = make(gone)
    with guard.waiting():
        gone.error = StoreError("removed")
        assert ends.get(timeout=10) is gone.error


def test_the_store_explains_what_goes_wrong_without_it(gone):
    guard, _, _ = make(gone)
    with pytest.raises(RuntimeError, match="of its own"), guard.waiting():
        raise RuntimeError("of its own")
    with pytest.raises(StoreError, match="removed"), guard.waiting():
        gone.error = StoreError("removed")
        raise RuntimeError("No such file or directory")
