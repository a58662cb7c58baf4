"""The thread that lets the watchdog judge a pool's ranks, and ends those that hang."""

import contextlib
import threading
import time

from parallel_backend.wire import messages as m

from .failure_report import FailureReport, RankError
from .gathers import Gathers
from .local import Ranks
from .watchdog import Watchdog

DUMP_SECONDS = 0.3
"""For a rank that hangs to write down where."""


class WatchdogThread:
    """Judges every `tick` seconds. It ends processes, which the pool's own thread then notices: that one may be blocked."""

    def __init__(self, watchdog: Watchdog, ranks: Ranks, gathers: Gathers, failures: FailureReport, tick: float):
        self._watchdog, self._ranks, self._gathers, self._failures, self._tick = watchdog, ranks, gathers, failures, tick
        self._ended, self._stop_ranks = threading.Event(), False
        self.error: Exception | None = None
        """What the ranks were ended for: they hang, or judging failed."""
        self._thread = threading.Thread(target=self._run, name="parallel-dit-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, stop_ranks: bool = False) -> None:
        """Judge no more. `stop_ranks`: ask the ranks to end, from this thread: one that is stopped may take nothing."""
        self._stop_ranks |= stop_ranks
        self._ended.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread's end, but no longer; not at all on the thread itself."""
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
        """Until `end`, or until ranks are found to hang: the error that says so."""
        last = time.monotonic()
        while not self._ended.wait(self._tick):
            now = time.monotonic()
            sending = [channel.sending for channel in self._ranks.channels]
            # A longer turn than that was none of the ranks' doing.
            verdict = self._watchdog.tick(min(now - last, 2 * self._tick), self._gathers.awaited, sending)
            last = now
            if verdict is not None and not self._failures.pending:
                if verdict.hung:
                    for rank in range(len(self._ranks.names)):
                        self._ranks.dump(rank)
                    self._ended.wait(DUMP_SECONDS)
                return self._failures.hang(verdict)
        return None
