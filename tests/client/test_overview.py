"""What a person is shown of the ranks: states, memory and models, read without a message to any rank."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from parallel_backend.client.overview import overview_of
from parallel_backend.wire import messages as m


def pool_with(beat, ready=True, error=None):
    done = Future()
    if ready:
        done.set_result(None)
    return SimpleNamespace(
        devices=("cpu",),
        watchdog=SimpleNamespace(beat=lambda _rank: beat),
        ready=done,
        error=error,
        notes=(),
        ranks=SimpleNamespace(logs=None),
    )


@pytest.mark.parametrize(
    ("beat", "more", "state", "doing"),
    [
        (None, {"ready": False}, "starting", ""),
        (m.HeartbeatMessage(0, "importing torch", 1, False), {"ready": False}, "starting", "importing torch"),
        (m.HeartbeatMessage(0, m.IDLE, 1, False, 5, 9), {}, "idle", ""),
        (m.HeartbeatMessage(0, "micro-step 7", 1, False, 5, 9, 3), {}, "working", "micro-step 7"),
        (m.HeartbeatMessage(0, "micro-step 7", 1, True, 5, 9), {}, "waiting", "micro-step 7"),
        (m.HeartbeatMessage(0, "micro-step 7", 1, True, 5, 9), {"error": RuntimeError("killed\nits log")}, "failed", ""),
    ],
)
def test_what_a_rank_does(beat, more, state, doing):
    found = overview_of(pool_with(beat, **more), [])
    (rank,) = found["ranks"]
    assert (rank["state"], rank["doing"]) == (state, doing)
    assert (rank["free"], rank["total"]) == ((5, 9) if beat is not None and beat.total_bytes else (0, 0))
    assert rank["run"] == (0 if beat is None else beat.run_bytes)
    assert found["error"] == ("killed" if "error" in more else "")
