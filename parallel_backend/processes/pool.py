"""The ranks of one set of devices: started once, watched, kept between prompts, ended together when one fails."""

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from parallel_backend.wire import messages as m

from .failure_text import died, explained, failed
from .local import LocalRanks, Plan, Ranks
from .watchdog import SILENCE_SECONDS, Verdict, Watchdog

log = logging.getLogger(__name__)

Poll = Callable[[], None]
"""Called many times a second while the client waits; raises to give up (ComfyUI's Cancel does)."""

Progress = Callable[[str, float], None]
"""Called now and then while a model is brought onto the ranks: what they are doing, and the share of it that is done."""

POLL_SECONDS = 0.05
BLAME_SECONDS = 1.0
"""How long to look for the root cause after a rank reports that a transfer failed: the rank that died explains more."""
STOP_SECONDS = 3.0
DUMP_SECONDS = 0.3
"""For a rank that hangs to write down where."""

_Key = tuple[type, int | None]
"""What a request waits for: the replies' type and, where they have one, their run."""


class RankError(RuntimeError):
    """A rank failed. The message names it, its device and what it was doing; the pool is gone, the next use rebuilds it."""


def again(error: Exception) -> Exception:
    """The error once more, to be raised to someone else: what it was raised through before is not kept alive by it."""
    return copy.copy(error)


def wait_for(future: Future, poll: Poll) -> Any:
    """The future's result; `poll` runs while it is not there yet."""
    while True:
        try:
            return future.result(timeout=POLL_SECONDS)
        except FutureTimeout:
            if future.done():  # it came between the time-out and here, or is a time-out error itself
                return future.result()
            poll()


class Pool:
    """One process per device, and one model at a time on them (see `take_over`).

    `threads`: CPU threads per rank; None shares the machine's cores out evenly. `slowdown`: per rank, see
    RankSettings; None is full speed for all. `start`: where the processes run. `silence`: seconds without a sign of
    life after which a rank counts as stopped; `watchdog` has the other limits. `logs`: the folder in which the ranks' logs
    are kept; None keeps them no longer than the ranks.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        threads: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        slowdown: tuple[float, ...] | None = None,
        start: Callable[[Plan], Ranks] = LocalRanks,
        silence: float = SILENCE_SECONDS,
        logs: Path | None = None,
    ):
        self.devices, self.logs = devices, logs
        self.slowdown = slowdown or (1.0,) * len(devices)
        self.threads = threads or max(1, (os.cpu_count() or 1) // len(devices))
        self.error: Exception | None = None
        self.newest_step = 0
        """Number of the newest micro-step sent, by any model: they are counted on, so that what is left of one is told from
        an output that nobody asked for."""
        self._on_output: Callable[[m.Output], None] = lambda output: None
        self._on_loading: Callable[[m.Loading], None] = lambda loading: None
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._gathers: dict[_Key, tuple[Future, dict[int, Any]]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._failed_at: float | None = None
        self._failures: list[m.Failure] = []
        self._cut_off: list[int] = []  # ranks whose connection ended
        self._verdict: Exception | None = None  # the watchdog's
        self._ended, self._polite = threading.Event(), False
        self.watchdog = Watchdog(len(devices), silence)
        ready = self._expect((m.Ready, None))
        self.ranks = start(Plan(devices, self.threads, timeout, self.slowdown, logs, min(1.0, silence / 5)))
        self._watcher = threading.Thread(target=self._watch, name="parallel-dit-pool", daemon=True)
        tick = max(0.2, min(0.5, silence / 5))
        self._guard = threading.Thread(target=self._keep_watch, args=(tick,), name="parallel-dit-watchdog", daemon=True)
        self._guard.start()
        self._watcher.start()  # last: what it hears may end the pool at once, and with it the other thread
        self.ready: Future = ready

    @property
    def pids(self) -> tuple[int, ...]:
        return self.ranks.pids

    def take_over(
        self,
        on_output: Callable[[m.Output], None],
        on_loading: Callable[[m.Loading], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """From now on these get every Output and Loading, and the pool's failure, on its own thread.

        Their predecessor is let go.
        """
        self._on_failure(RuntimeError("Parallel DiT: another model has been loaded on these ranks"))
        self._on_output, self._on_loading, self._on_failure = on_output, on_loading, on_failure

    def send(self, rank: int, message: Any) -> None:
        """Raises RankError if the pool has failed; a rank that is just gone is reported by the watcher.

        Blocks while the rank takes nothing: no longer than the watchdog lets a rank be silent.
        """
        if self.error is not None:
            raise again(self.error)
        self.watchdog.sent(message)
        with contextlib.suppress(OSError):
            self.ranks.channels[rank].send(message)

    def ask(self, message: Any, reply: type) -> Future:
        """Send to every rank; the future gives their replies of type `reply`, in rank order."""
        future = self._expect((reply, getattr(message, "run", None)))
        self.tell(message)
        return future

    def tell(self, message: Any) -> None:
        """Send to every rank; whatever they reply is dropped."""
        for rank in range(len(self.devices)):
            self.send(rank, message)

    def close(self, politely: bool = True) -> None:
        """End all ranks: politely, then by force. Idempotent.

        Not `politely`: by force at once. A rank that starts or loads would not hear the request until it is done.
        """
        if self._closing:
            return
        self._closing = True
        if politely:
            self._polite = True
            self._ended.set()
            self.ranks.join(STOP_SECONDS)
        self._end(RankError("Parallel DiT: the ranks were ended"))

    def _end(self, error: Exception) -> None:
        """Kill all, and let go whoever waits for them."""
        self._closing = True
        self._ended.set()
        try:
            # Before any lock of the client's is asked for: who holds it may be blocked in a send, which this ends.
            self.ranks.kill()
            for thread in {self._watcher, self._guard} - {threading.current_thread()}:
                thread.join(STOP_SECONDS)  # before its connections are closed under it
            for channel in self.ranks.channels:
                channel.close()
        finally:  # whatever the system refuses to do, nobody goes on waiting
            with self._lock:
                self.error = error
                gathers, self._gathers = self._gathers, {}
            for future, _ in gathers.values():
                future.set_exception(again(error))
            self._on_failure(error)

    def _expect(self, key: _Key) -> Future:
        with self._lock:
            assert key not in self._gathers, f"two requests wait for {key}"
            future: Future = Future()
            if self.error is not None:
                future.set_exception(again(self.error))
            else:
                self._gathers[key] = (future, {})
            return future

    def _watch(self) -> None:
        """The pool's thread. Whatever goes wrong in it ends the pool with that error: nobody else would notice."""
        try:
            self._hand_on()
        except Exception as error:
            if not self._closing:
                self._fail(error)
            raise

    def _hand_on(self) -> None:
        """Hand messages on, notice deaths, name the culprit."""
        sources = {channel.connection: rank for rank, channel in enumerate(self.ranks.channels)}
        ends = dict(self.ranks.ends)
        while not self._closing:
            self.watchdog.turns += 1
            for source in wait([*sources, *ends], timeout=0.1):
                if source in sources:
                    rank = sources[source]
                    try:
                        ended = not self._take(rank)
                    except m.BadMessage as error:
                        self.refuse(rank, str(error))
                        return
                    if ended:
                        del sources[source]
                        self._cut_off.append(rank)
                        self._failed_at = self._failed_at or time.monotonic()
                else:
                    del ends[source]
                    self._failed_at = self._failed_at or time.monotonic()
            if self._verdict is not None and not self._closing:
                self._fail(self._verdict)
            elif self._failed_at is not None and not self._closing:
                self._report_failure()

    def _take(self, rank: int) -> bool:
        """Receive a message and hand it on; False where the connection has ended."""
        self.watchdog.receiving = rank
        try:
            message = self.ranks.channels[rank].receive()
        except (EOFError, OSError):
            return False
        finally:
            self.watchdog.receiving = None
        self._receive(rank, message)
        return True

    def refuse(self, rank: int, why: str) -> Exception:
        """End the pool: what the rank sent cannot be, and nothing else from it is to be trusted. The error, to be raised."""
        if self.error is None:
            text = f"{self._name(rank)} sent what cannot be: {why}. All ranks were ended; the next use starts new ones."
            self._fail(RankError(explained(text, "", [self.ranks.log_tail(rank)], self.logs)))
        return self.error

    def _receive(self, rank: int, message: Any) -> None:
        if getattr(message, "rank", None) != rank:
            raise m.BadMessage(f"{type(message).__name__} of rank {getattr(message, 'rank', None)}")
        self.watchdog.heard(rank, message)
        if isinstance(message, m.Output):
            self._on_output(message)
        elif isinstance(message, m.Loading):
            self._on_loading(message)
        elif isinstance(message, m.Failure):
            self._failures.append(message)
            self._failed_at = self._failed_at or time.monotonic()
        elif not isinstance(message, m.HeartbeatMessage):
            key = (type(message), getattr(message, "run", None))
            with self._lock:
                if key not in self._gathers:
                    return
                future, replies = self._gathers[key]
                replies[message.rank] = message
                complete = len(replies) == len(self.devices)
                if complete:
                    del self._gathers[key]
            if complete:
                future.set_result([replies[rank] for rank in sorted(replies)])

    def _keep_watch(self, tick: float) -> None:
        """The watchdog's thread. It ends processes, which the pool's thread then notices: that one may be blocked."""
        try:
            self._verdict = self._judge(tick)
        except Exception as error:
            self._verdict = error
            raise
        finally:
            if self._verdict is not None:
                self.ranks.kill()
        if self._polite:  # asked from here, since a rank that is stopped may take nothing
            for channel in self.ranks.channels:
                with contextlib.suppress(OSError):
                    channel.send(m.Stop())

    def _judge(self, tick: float) -> RankError | None:
        last = time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            with self._lock:
                awaited = [reply for reply, _ in self._gathers]
            blocked = [channel.sending for channel in self.ranks.channels]
            # A longer turn than that was none of the ranks' doing.
            verdict = self.watchdog.tick(min(now - last, 2 * tick), awaited, blocked)
            last = now
            if verdict is not None and self._failed_at is None:
                return self._report_hang(verdict)
        return None

    def _report_hang(self, verdict: Verdict) -> RankError:
        if verdict.hung:
            for rank in range(len(self.devices)):
                self.ranks.dump(rank)
            self._ended.wait(DUMP_SECONDS)
        names = " and ".join(map(self._name, verdict.ranks))
        logs = [self.ranks.log_tail(rank) for rank in verdict.ranks]
        return RankError(explained(f"{names} {verdict.text}", "", logs, self.logs))

    def _report_failure(self) -> None:
        """Once the root cause is known, or waiting for it is over: end the pool with an error that names it."""
        reported = {failure.rank for failure in self._failures}
        ended = {rank: how for rank in range(len(self.devices)) if (how := self.ranks.how_ended(rank)) is not None}
        own = [failure for failure in self._failures if not failure.peer]
        late = time.monotonic() - self._failed_at > BLAME_SECONDS
        # One that has ended may have said why: what it sent last is read first, until its connection's end.
        died_unheard = [rank for rank in ended if rank not in reported and (late or rank in self._cut_off)]
        trace, log_end = "", ""
        if own:
            failure = own[0]
            text, trace = failed(self._name(failure.rank), failure.doing, failure.summary), failure.traceback
        elif died_unheard:
            rank = died_unheard[0]
            log_end = self.ranks.log_tail(rank)
            text = died(self._name(rank), ended[rank], self.watchdog.doing(rank), log_end)
        elif late and self._failures:
            failure = self._failures[0]
            text, trace = f"{self._name(failure.rank)} lost its peer: {failure.summary}", failure.traceback
        elif late:
            rank = self._cut_off[0]
            log_end = self.ranks.log_tail(rank)
            text = died(self._name(rank), "closed its connection", self.watchdog.doing(rank), log_end)
        else:
            return
        self._fail(RankError(explained(text, trace, [log_end], self.logs)))

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.ranks.names[rank]})"

    def _fail(self, error: Exception) -> None:
        error = self._verdict or error
        log.warning("%s", str(error).partition("\n")[0])
        self._end(error)
