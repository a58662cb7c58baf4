"""A thread that can end the rank while its main thread is blocked inside a library."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from parallel_backend.wire.heartbeat import Heartbeat

LOOK_SECONDS = 0.5
"""Interval between two checks of the store."""


class Guard:
    """Ends the rank if its peers are gone. `check` raises if the rendezvous is gone. `end(error)` reports and ends the
    process."""

    def __init__(self, heartbeat: Heartbeat, check: Callable[[], None], end: Callable[[BaseException], None]):
        self.heartbeat, self._check, self._end = heartbeat, check, end

    @contextlib.contextmanager
    def waiting(self, seconds: float | None = None, late: Callable[[], BaseException] = TimeoutError) -> Iterator[None]:
        """Context for code that waits for other ranks. The client's watchdog does not count this rank as hanging.

        If `check` raises, the rank ends with that error, even while the waiting thread is blocked. After `seconds` it ends
        with `late()`. None: no limit.
        """
        done = threading.Event()
        threading.Thread(target=self._watch, args=(done, seconds, late), name="guard", daemon=True).start()
        try:
            with self.heartbeat.blocked():
                yield
        except RuntimeError:
            self._check()  # if the rendezvous is gone, its error says more than the library's
            raise
        finally:
            done.set()

    def _watch(self, done: threading.Event, seconds: float | None, late: Callable[[], BaseException]) -> None:
        began = time.monotonic()
        while True:
            left = None if seconds is None else began + seconds - time.monotonic()
            if left is not None and left <= 0:
                if not done.is_set():
                    self._end(late())
                return
            if done.wait(LOOK_SECONDS if left is None else min(left, LOOK_SECONDS)):
                return
            try:
                self._check()
            except RuntimeError as error:
                self._end(error)
                return
