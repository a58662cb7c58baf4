"""The thread on which the watchdog judges a pool's ranks, and which kills ranks that hang."""

import contextlib
import threading
import time

from parallel_backend.wire import messages as m

from .failure_report import FailureReport, RankError
from .gathers import Gathers
from .local import Ranks
from .watchdog import Watchdog

DUMP_SECONDS = 0.3
"""Seconds for a rank that hangs to write its stacks."""


class WatchdogThread:
    """Asks the watchdog every `tick` seconds, and kills the ranks after a verdict, which unblocks the pool's receiving
    thread."""

    def __init__(self, watchdog: Watchdog, ranks: Ranks, gathers: Gathers, failures: FailureReport, tick: float):
        self._watchdog, self._ranks, self._gathers, self._failures, self._tick = watchdog, ranks, gathers, failures, tick
        self._ended, self._stop_ranks = threading.Event(), False
        self.error: Exception | None = None
        """Why the ranks were killed: because they hang, or because the watchdog failed. None: they were not."""
        self._thread = threading.Thread(target=self._run, name="parallel-dit-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, stop_ranks: bool = False) -> None:
        """Stop judging. `stop_ranks`: ask the ranks to end, on this thread, because a stopped rank would block the
        sender."""
        self._stop_ranks |= stop_ranks
        self._ended.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, but at most `seconds`. Returns at once if called on the thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.error = self._watchdog_loop()
        except Exception as error:
            self.error = error
            raise
        finally:
            if self.error is not None:
                self._ranks.kill()
        if self._stop_ranks:
            for channel in self._ranks.channels:
                with contextlib.suppress(OSError):
                    channel.send(m.Stop())

    def _watchdog_loop(self) -> RankError | None:
        """Judge until `end` is called or ranks hang. Returns the error about ranks that hang, or None."""
        last = time.monotonic()
        while not self._ended.wait(self._tick):
            now = time.monotonic()
            sending = [channel.sending for channel in self._ranks.channels]
            # If this thread slept for longer, so did the machine: that time does not count against the ranks.
            verdict = self._watchdog.tick(min(now - last, 2 * self._tick), self._gathers.awaited, sending)
            last = now
            if verdict is not None and not self._failures.pending:
                if verdict.hung:
                    for rank in range(len(self._ranks.names)):
                        self._ranks.dump(rank)
                    self._ended.wait(DUMP_SECONDS)
                return self._failures.hang(verdict)
        return None
