"""Replies find the request that they answer, by its id."""

import pytest

from parallel_backend.processes.failure_report import RankError
from parallel_backend.processes.gathers import Gathers
from parallel_backend.wire import messages as m


def test_two_requests_of_one_kind_get_their_own_replies():
    gathers = Gathers(2)
    (one, first), (two, second) = gathers.open(m.Adapted), gathers.open(m.Adapted)
    assert gathers.awaited == [m.Adapted, m.Adapted]
    gathers.add(two, 0, m.Adapted(0, 20, 0))
    gathers.add(one, 1, m.Adapted(1, 11, 0))
    gathers.add(one, 0, m.Adapted(0, 10, 0))
    assert first.result(timeout=0) == [m.Adapted(0, 10, 0), m.Adapted(1, 11, 0)]
    assert not second.done()
    gathers.add(two, 1, m.Adapted(1, 21, 0))
    assert second.result(timeout=0) == [m.Adapted(0, 20, 0), m.Adapted(1, 21, 0)]
    assert not gathers.awaited


@pytest.mark.parametrize("late", [None, 7], ids=["to no request", "to a request that was not made"])
def test_a_reply_that_nobody_waits_for_is_dropped(late):
    gathers = Gathers(1)
    answered, future = gathers.open(m.Unloaded)
    gathers.add(late, 0, m.Unloaded(0))
    assert not future.done()
    for _ in range(2):  # the second time it is answered already
        gathers.add(answered, 0, m.Unloaded(0))
    assert future.result(timeout=0) == [m.Unloaded(0)]


def test_a_reply_of_another_type_is_refused():
    gathers = Gathers(1)
    request_id, future = gathers.open(m.Unloaded)
    with pytest.raises(m.BadMessage, match="Adapted in reply to a request for Unloaded"):
        gathers.add(request_id, 0, m.Adapted(0, 1, 0))
    assert not future.done()


def test_a_failure_ends_all_requests_and_those_to_come():
    gathers = Gathers(2)
    request_id, before = gathers.open(m.Unloaded)
    gathers.add(request_id, 0, m.Unloaded(0))
    error = RankError("rank 1 (cpu) was killed by signal 9")
    gathers.fail(error)
    _, after = gathers.open(m.Unloaded)
    for future in (before, after):
        assert isinstance(future.exception(timeout=0), RankError)
        assert future.exception() is not error  # what that was raised through is not kept alive
    assert not gathers.awaited
    gathers.add(request_id, 1, m.Unloaded(1))
