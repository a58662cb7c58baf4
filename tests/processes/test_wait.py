"""Waiting for ranks looks for Cancel."""

import threading
from concurrent.futures import Future

import pytest

from parallel_backend.processes.pool import wait_for


class Cancelled(BaseException):
    pass


def test_whoever_waits_may_give_up():
    looked = []

    def poll() -> None:
        looked.append(threading.current_thread())
        if len(looked) == 3:
            raise Cancelled

    future = Future()
    late = threading.Timer(20, future.set_result, (None,))
    late.start()
    try:
        with pytest.raises(Cancelled):
            wait_for(future, poll)
    finally:
        late.cancel()
    assert looked == [threading.current_thread()] * 3


def test_what_is_there_is_not_waited_for():
    future = Future()
    future.set_result(3)

    def poll() -> None:
        raise Cancelled

    assert wait_for(future, poll) == 3
