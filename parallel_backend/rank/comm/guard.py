"""A thread beside what blocks a rank's main thread inside of a library, where nothing else can end it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from parallel_backend.wire.heartbeat import Heartbeat

LOOK_SECONDS = 0.5
"""Between two looks at the store."""


class Guard:
    """`check` raises when what the ranks meet through is gone. `end(error)` reports the error and ends the process."""

    def __init__(self, heartbeat: Heartbeat, check: Callable[[], None], end: Callable[[BaseException], None]):
        self._heartbeat, self._check, self._end = heartbeat, check, end

    @contextlib.contextmanager
    def waiting(self, seconds: float | None = None, late: Callable[[], BaseException] = TimeoutError) -> Iterator[None]:
        """Around what cannot end before other ranks do their part: the watchdog blames nobody who is in it.

        It ends with `check`'s error where that raises, also while the thread that entered it is blocked, and with `late()`
        after so many seconds; without limit if `seconds` is None.
        """
        done = threading.Event()
        threading.Thread(target=self._watch, args=(done, seconds, late), name="guard", daemon=True).start()
        try:
            with self._heartbeat.blocked():
                yield
        except RuntimeError:
            self._check()  # what went wrong in a store that is gone says less than that it is gone
            raise
        finally:
            done.set()

    def blocked(self) -> contextlib.AbstractContextManager[None]:
        """Around what cannot end before other ranks do their part, but does not need what they meet through."""
        return self._heartbeat.blocked()

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
