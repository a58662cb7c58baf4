"""A thread that can end the rank while its main thread is blocked inside a library."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from parallel_backend.wire.heartbeat import Heartbeat

LOOK_SECONDS = 0.5
"""Between two looks at the store."""


class Guard:
    """`check` raises when the rendezvous is gone. `end(error)` reports the error and ends the process."""

    def __init__(self, heartbeat: Heartbeat, check: Callable[[], None], end: Callable[[BaseException], None]):
        self.heartbeat, self._check, self._end = heartbeat, check, end

    @contextlib.contextmanager
    def waiting(self, seconds: float | None = None, late: Callable[[], BaseException] = TimeoutError) -> Iterator[None]:
        """Around code that waits for other ranks: the client's watchdog does not take this rank for one that hangs.

        The rank ends with `check`'s error as soon as `check` raises, also while the entering thread is blocked, and with
        `late()` after `seconds`. None: no limit.
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
