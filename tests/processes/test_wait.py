"""Waiting for ranks looks for Cancel."""

import threading
from concurrent.futures import Future
from unittest import mock

import pytest

from parallel_backend.processes.pool import wait_for
from testing.models import Cancelled


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


@pytest.mark.parametrize("outcome", ["there", TimeoutError("its own")], ids=str)
def test_a_result_that_comes_as_the_wait_for_it_times_out_is_a_result(outcome):
    late = mock.Mock(done=lambda: True)
    late.result.side_effect = [TimeoutError(), outcome]
    if outcome == "there":
        assert wait_for(late, lambda: None) == outcome
    else:
        with pytest.raises(TimeoutError, match="its own"):
            wait_for(late, lambda: None)
