"""The ranks of one set of devices: started once, watched, kept between prompts, ended together when one fails."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import SELF_TEST, SelfTest
from parallel_backend.wire.shared_memory import Segment

from .failure_report import FailureReport, RankError, again
from .failure_report import LinksDown as LinksDown
from .failure_text import P2P_OFF
from .gathers import Gathers
from .local import LocalRanks, Ranks, StartSettings
from .watchdog import SILENCE_SECONDS, Watchdog
from .watchdog_thread import WatchdogThread

log = logging.getLogger(__name__)

Poll = Callable[[], None]
"""Called many times a second while the client waits; raises to give up (ComfyUI's Cancel does)."""

LoadProgress = Callable[[str, float], None]
"""Called now and then while a model is brought onto the ranks: what they are doing, and the share of it that is done."""

POLL_SECONDS = 0.05
STOP_SECONDS = 3.0


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
    RankSettings; None is full speed for all. `start`: where the processes run. `silence`: seconds without a heartbeat
    after which a rank counts as stopped; `watchdog` has the other limits. `logs`: the folder in which the ranks' logs
    are kept; None keeps them no longer than the ranks. LinksDown where the ranks' `self_test` of their links fails.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        threads: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        slowdown: tuple[float, ...] | None = None,
        start: Callable[[StartSettings], Ranks] = LocalRanks,
        silence: float = SILENCE_SECONDS,
        logs: Path | None = None,
        self_test: SelfTest = SELF_TEST,
    ):
        self.devices, self.logs, self.self_test = devices, logs, self_test
        self.slowdown = slowdown or (1.0,) * len(devices)
        self.threads = threads or max(1, (os.cpu_count() or 1) // len(devices))
        self.error: Exception | None = None
        self.newest_step = 0
        """Number of the newest micro-step sent, by any model: they are counted on, so that what is left of one is told from
        an output that nobody asked for."""
        self._on_output: Callable[[m.Output], None] = lambda output: None
        self._on_loading: Callable[[m.Loading], None] = lambda loading: None
        self._on_failure: Callable[[Exception], None] = lambda error: None
        self._closing = False
        self._gathers = Gathers(len(devices))
        self._start_id, ready = self._gathers.open(m.Ready)
        self.watchdog = Watchdog(len(devices), silence)
        beat = min(1.0, silence / 5)
        self.ranks = start(StartSettings(devices, self.threads, timeout, self.slowdown, logs, beat, self_test))
        self._failures = FailureReport(self.ranks, self.watchdog.doing, logs)
        tick = max(0.2, min(0.5, silence / 5))
        self._watchdog_thread = WatchdogThread(self.watchdog, self.ranks, self._gathers, self._failures, tick)
        self._receiver = threading.Thread(target=self._receive_all, name="parallel-dit-pool", daemon=True)
        self._watchdog_thread.start()
        self._receiver.start()  # last: what it hears may end the pool at once, and with it the other thread
        self.ready: Future = ready

    @property
    def pids(self) -> tuple[int, ...]:
        return self.ranks.pids

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever uses these ranks should know of them."""
        return () if self.self_test.p2p else (P2P_OFF,)

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

    def send(self, rank: int, message: Any, request_id: int | None = None) -> None:
        """Raises RankError if the pool has failed; a rank that is just gone is reported by the receiving thread.

        Blocks while the rank takes nothing: no longer than the watchdog lets a rank be silent.
        """
        self._raise_error()
        self.watchdog.sent(message)
        try:
            with self.together(), contextlib.suppress(OSError):
                self.ranks.channels[rank].send(message, request_id)
        except BaseException:
            self.watchdog.not_sent(message)
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around messages that the ranks need all of, or none: they would wait for each other. An error between them, or in
        the middle of one, ends the pool at once, and the next prompt has nothing to do with it."""
        before = self._begun
        try:
            yield
        except BaseException as error:
            if self.error is None and self._begun != before:
                self._fail(self._failures.cut_short(error))
            raise

    @property
    def _begun(self) -> int:
        """Messages of which at least a part was written, to whichever rank."""
        return sum(channel.begun for channel in self.ranks.channels)

    def lends_to(self, rank: int) -> bool:
        """Whether tensors for the rank can lie in memory that it shares with this process."""
        return self.ranks.channels[rank].lends

    def lend(self, rank: int, segment: Segment) -> None:
        """See Channel.lend. Raises as `send`."""
        self._raise_error()
        with self.together(), contextlib.suppress(OSError):
            self.ranks.channels[rank].lend(segment)

    def take_back(self, rank: int, segment: Segment) -> None:
        """See Channel.take_back. Raises as `send`."""
        self._raise_error()
        with self.together(), contextlib.suppress(OSError):
            self.ranks.channels[rank].take_back(segment.number)

    def forget(self, rank: int, segment: Segment) -> None:
        """See Channel.forget. Also once the pool has failed."""
        self.ranks.channels[rank].forget(segment.number)

    def ask(self, message: Any, reply: type) -> Future:
        """Send to every rank; the future gives their replies of type `reply`, in rank order."""
        request_id, future = self._gathers.open(reply)
        try:
            with self.together():
                for rank in range(len(self.devices)):
                    self.send(rank, message, request_id)
        except BaseException:
            self._gathers.drop(request_id)
            raise
        return future

    def tell(self, message: Any) -> None:
        """Send to every rank; whatever they reply is dropped."""
        with self.together():
            for rank in range(len(self.devices)):
                self.send(rank, message)

    def refuse(self, rank: int, why: str) -> Exception:
        """End the pool: what the rank sent cannot be, and nothing else from it is to be trusted. The error, to be raised."""
        if self.error is None:
            self._fail(self._failures.refusal(rank, why))
        return self.error

    def close(self, politely: bool = True) -> None:
        """End all ranks: politely, then by force. Idempotent.

        Not `politely`: by force at once. A rank that starts or loads would not hear the request until it is done.
        """
        if self._closing:
            return
        self._closing = True
        if politely:
            self._watchdog_thread.end(stop_ranks=True)
            self.ranks.join(STOP_SECONDS)
        self._end(RankError("Parallel DiT: the ranks were ended"))

    def _raise_error(self) -> None:
        if self.error is not None:
            raise again(self.error)

    def _fail(self, error: Exception) -> None:
        error = self._watchdog_thread.error or error
        log.warning("%s", str(error).partition("\n")[0])
        self._end(error)

    def _end(self, error: Exception) -> None:
        """Kill all, and let go whoever waits for them."""
        self._closing = True
        self._watchdog_thread.end()
        try:
            # Before any lock of the client's is asked for: who holds it may be blocked in a send, which this ends.
            self.ranks.kill()
            # Both threads, before their connections are closed under them.
            self._watchdog_thread.join(STOP_SECONDS)
            if self._receiver is not threading.current_thread():
                self._receiver.join(STOP_SECONDS)
            for channel in self.ranks.channels:
                channel.close()
        finally:  # whatever the system refuses to do, nobody goes on waiting
            self.error = error
            self._gathers.fail(error)
            self._on_failure(error)

    def _receive_all(self) -> None:
        """The receiving thread. Whatever goes wrong in it ends the pool with that error: nobody else would notice."""
        try:
            self._receive_until_end()
        except Exception as error:
            if not self._closing:
                self._fail(error)
            raise

    def _receive_until_end(self) -> None:
        """Hand messages on, notice that ranks have ended, end the pool once the cause of a failure is known."""
        sources = {channel.connection: rank for rank, channel in enumerate(self.ranks.channels)}
        ends = dict(self.ranks.ends)
        while not self._closing:
            self.watchdog.turns += 1
            for source in wait([*sources, *ends], timeout=0.1):
                if source in sources:
                    rank = sources[source]
                    try:
                        ended = not self._receive_from(rank)
                    except m.BadMessage as error:
                        self.refuse(rank, str(error))
                        return
                    if ended:
                        del sources[source]
                        self._failures.note_cut_off(rank)
                else:
                    del ends[source]
                    self._failures.note_end()
            if self._closing:
                return
            if self._watchdog_thread.error is not None:
                self._fail(self._watchdog_thread.error)
            elif self._failures.pending and (error := self._failures.root_cause()) is not None:
                self._fail(error)

    def _receive_from(self, rank: int) -> bool:
        """Receive a message and hand it on; False where the connection has ended."""
        self.watchdog.receiving = rank
        try:
            message, request_id = self.ranks.channels[rank].receive()
        except (EOFError, OSError):
            return False
        finally:
            self.watchdog.receiving = None
        self._hand_on(rank, message, request_id)
        return True

    def _hand_on(self, rank: int, message: Any, request_id: int | None) -> None:
        if getattr(message, "rank", None) != rank:
            raise m.BadMessage(f"{type(message).__name__} of rank {getattr(message, 'rank', None)}")
        self.watchdog.heard(rank, message)
        match message:
            case m.Output():
                self._on_output(message)
            case m.Loading():
                self._on_loading(message)
            case m.Failure():
                self._failures.note_failure(message)
            case m.Ready():
                self._gathers.add(self._start_id, rank, message)
            case _:
                self._gathers.add(request_id, rank, message)
