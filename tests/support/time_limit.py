"""A test that hangs fails with the stacks of all threads, and the tests behind it run.

The limit is a signal's: the main thread leaves locks, joins, pipes and sockets for it. A test that ignores the signal, in a
call that never comes back to Python, ends its process, with the stacks on the process's standard error. A forked rank has no
timer.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

SECONDS = 600.0
LONGER = {"full": 1800.0, "comfyui": 1200.0}
"""Mark -> limit of tests with it: long tables; scripts in ComfyUI, which are ended after 900 s and say what they printed."""
GRACE = 120.0
"""Further seconds for a test that has failed and clears up, before its process ends."""


class TimeLimit:
    """The plugin. Set-up, test and clearing up have the limit each."""

    def __init__(self) -> None:
        self._stderr = os.dup(sys.__stderr__.fileno())  # pytest puts another file in its place while a test runs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        with limited(limit_of(item), GRACE, self._stderr):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with limited(limit_of(item), GRACE, self._stderr):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with limited(limit_of(item), GRACE, self._stderr):
            return (yield)

    def pytest_unconfigure(self) -> None:
        os.close(self._stderr)


def limit_of(item: pytest.Item) -> float:
    """Seconds."""
    return max((seconds for mark, seconds in LONGER.items() if item.get_closest_marker(mark)), default=SECONDS)


@contextmanager
def limited(seconds: float, grace: float, stderr: int) -> Iterator[None]:
    """Context whose code fails after so many seconds, and again after each `grace`. Where that is of no use, the process
    ends after `seconds` and twice `grace`, with the stacks written to the file descriptor `stderr`. Without SIGALRM
    (Windows) it ends after `seconds`."""

    def fail(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"it took longer than {seconds:g} s. Its threads:\n{stacks()}")

    has_alarm = hasattr(signal, "SIGALRM")
    faulthandler.dump_traceback_later(seconds + 2 * grace if has_alarm else seconds, file=stderr, exit=True)
    if has_alarm:
        before = signal.signal(signal.SIGALRM, fail)
        left = signal.setitimer(signal.ITIMER_REAL, seconds, grace)
    try:
        yield
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, *left)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def stacks() -> str:
    """What each thread of this process is doing, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
