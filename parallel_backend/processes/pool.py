"""The ranks on one set of devices. They are started once, watched, reused by later prompts, and all end when one fails."""

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from parallel_backend.core.cores import usable_cores
from parallel_backend.core.torch_settings import read_settings
from parallel_backend.wire import messages as m
from parallel_backend.wire.rank_settings import (
    BY_GLOO,
    P2P_OVER_NVLINK,
    SELF_TEST,
    WITHOUT_P2P,
    SelfTest,
    StartSettings,
)
from parallel_backend.wire.shared_memory import Segment

from .failure_report import DeviceFull as DeviceFull
from .failure_report import FailureReport, RankError, again
from .failure_report import LinksDown as LinksDown
from .failure_report import RankLost as RankLost
from .failure_text import NCCL_OFF, NVLINK_ALONE, P2P_OFF
from .gathers import Gathers
from .local import LocalRanks, Ranks
from .watchdog import SILENCE_SECONDS, Watchdog
from .watchdog_thread import WatchdogThread

log = logging.getLogger(__name__)

Poll = Callable[[], None]
"""Called many times a second while the client waits. It raises an exception to stop the wait, as at ComfyUI's Cancel."""

LoadProgress = Callable[[str, float], None]
"""Called now and then while a model is loaded, with the ranks' work as text and the fraction that is done."""


class Listener(Protocol):
    """Receives the ranks' messages about one model. Its methods run on the pool's receiving thread."""

    part_ranks: tuple[int, ...]
    """The pool's ranks that have the model. The `rank` of a message is the sender's index among them."""

    def on_output(self, output: m.Output) -> None: ...

    def on_loading(self, loading: m.Loading) -> None: ...

    def on_failure(self, error: Exception) -> None:
        """Called when the pool has failed. Pool.clear also calls it, on its caller's thread, for each model that it
        removes."""


KNOWN_TO_ALL = (m.Load, m.Unload, m.DropVAE)
"""Message types that go to all ranks of a pool even for a model on some of them: all ranks must create each process group,
and a rank must not keep its weights of a VAE that another rank has dropped."""
POLL_SECONDS = 0.05
STOP_SECONDS = 3.0
END_SECONDS = 15.0
"""The longest time for `close`, in which ranks are asked to end, are killed, and their connections are closed."""


def wait_for(future: Future, poll: Poll) -> Any:
    """Return the future's result. Calls `poll` repeatedly until the result is there."""
    while True:
        try:
            return future.result(timeout=POLL_SECONDS)
        except FutureTimeout:
            if future.done():  # the result came just now, or is a TimeoutError itself
                return future.result()
            poll()


class Pool:
    """One process per device, and the models on these processes (see `enter`).

    `threads`: CPU threads per rank; None divides the machine's cores evenly. `start` starts the processes. `silence`:
    seconds without a heartbeat after which a rank counts as stopped; `watchdog` has the other limits. `logs`: parent folder
    of these ranks' own log folder; None: logs are deleted with the ranks. The future `ready` fails with LinksDown if
    `self_test` fails.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        threads: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start: Callable[[StartSettings], Ranks] = LocalRanks,
        silence: float = SILENCE_SECONDS,
        logs: Path | None = None,
        self_test: SelfTest = SELF_TEST,
    ):
        self.devices, self.self_test = devices, self_test
        self.process = os.getpid()
        """Id of the process that started these ranks."""
        self.threads = threads or max(1, usable_cores() // len(devices))
        self.error: Exception | None = None
        self.segments = itertools.count(1)
        """The next numbers for segments of shared memory."""
        self._models: WeakValueDictionary[int, Listener] = WeakValueDictionary()
        self._numbers = itertools.count(1)  # of models
        self._newest = 0  # number of the newest model
        self._order = threading.RLock()  # held while sending, so that messages to several ranks have one order on all ranks
        self._closing = False
        self._claiming = threading.Lock()  # of `_closing` by one of several threads that close
        self._gone = threading.Event()  # set once the ranks have ended
        self._gathers = Gathers(len(devices))
        self._start_id, ready = self._gathers.open(m.Ready)
        self.watchdog = Watchdog(len(devices), silence)
        beat = min(1.0, silence / 5)
        self.ranks = start(StartSettings(devices, self.threads, timeout, logs, beat, self_test, read_settings()))
        self._failures = FailureReport(self.ranks, self.watchdog.doing)
        tick = max(0.2, min(0.5, silence / 5))
        self._watchdog_thread = WatchdogThread(self.watchdog, self.ranks, self._gathers, self._failures, tick)
        self._receiver = threading.Thread(target=self._receive_all, name="parallel-dit-pool", daemon=True)
        self._watchdog_thread.start()
        self._receiver.start()  # last: a message may end the pool at once, and that joins the watchdog's thread
        self.ready: Future = ready

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about these ranks for the user."""
        note = {P2P_OVER_NVLINK: NVLINK_ALONE, WITHOUT_P2P: P2P_OFF, BY_GLOO: NCCL_OFF}.get(self.self_test.transport)
        return () if note is None else (note,)

    @property
    def whole(self) -> "Pool":
        """The pool to which these ranks belong, see PoolPart."""
        return self

    @property
    def part_ranks(self) -> tuple[int, ...]:
        """If these ranks are a part of a pool: their rank numbers in the pool. Empty: they are all ranks of the pool."""
        return ()

    def doing(self, rank: int) -> str:
        """Return the rank's last known work, see Watchdog.doing."""
        return self.watchdog.doing(rank)

    def place(self, rank: int) -> int | None:
        """Return the number among these ranks of a rank of the pool, or None if it is not one of them."""
        return rank

    def enter(self, model: Listener, keep_others: bool = False) -> int:
        """Register a model and return its number. `model` gets its ranks' messages until it is garbage-collected or leaves.
        Without `keep_others` all other models end, and the ranks free them before they handle later messages."""
        if not keep_others:
            self.clear(RuntimeError("Parallel DiT: another model has been loaded on these ranks"))
        self._newest = number = next(self._numbers)
        self._models[number] = model
        return number

    def clear(self, why: Exception) -> None:
        """Let all models fail with the error `why`. The ranks free them, and parts of VAEs, after all earlier messages."""
        while self._models:
            self._models.popitem()[1].on_failure(why)
        if self._newest and self.error is None:
            self.tell(m.Unload())

    def leave(self, number: int) -> None:
        """Drop all later messages about the model with that number."""
        self._models.pop(number, None)

    def send(self, rank: int, message: Any, request_id: int | None = None, model: int | None = None) -> None:
        """Send a message to a rank, see `send_each`."""
        self.send_each([(rank, message)], request_id, model)

    def send_each(
        self, messages: Iterable[tuple[int, Any]], request_id: int | None = None, model: int | None = None
    ) -> None:
        """Send messages to ranks, with no other message between them. Raises RankError if the pool has failed; if a rank has
        just ended, the receiving thread reports it. `request_id`, `model`: see Envelope. Blocks while a rank reads nothing,
        until the watchdog kills it."""
        with self._in_order():
            for rank, message in messages:
                self._send(rank, message, request_id, model)

    def _send(self, rank: int, message: Any, request_id: int | None, model: int | None) -> None:
        self._raise_error()
        self.watchdog.sent(message, model)
        try:
            with contextlib.suppress(OSError):
                self.ranks.channels[rank].send(message, request_id, model)
        except BaseException:
            self.watchdog.not_sent(message, model)
            raise

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Context in which no other thread sends. An error after a message was begun ends the pool: its ranks are out of
        step, because those that got their message wait for the others."""
        cut_short = False
        try:
            with self._order:
                begun = self._begun
                try:
                    yield
                except BaseException:
                    cut_short = self._begun != begun
                    raise
        except BaseException as error:  # outside the lock: `_fail` takes the models' locks, whose holders may wait to send
            if cut_short and self.error is None:
                self._fail(self._failures.cut_short(error))
            raise

    @property
    def _begun(self) -> int:
        """The number of messages, summed over all ranks, that may have been written at least in part."""
        return sum(channel.begun for channel in self.ranks.channels)

    def lends_to(self, rank: int) -> bool:
        """Return whether this process can share memory with the rank, so that tensors need not be sent over the
        connection."""
        return self.ranks.channels[rank].lends

    def lend(self, rank: int, segment: Segment, model: int | None = None) -> None:
        """Let the rank use a segment of shared memory, see Channel.lend. Raises as `send` does."""
        self._raise_error()
        with self._in_order(), contextlib.suppress(OSError):
            self.ranks.channels[rank].lend(segment, model)

    def drop(self, rank: int, segment: Segment) -> None:
        """Tell the rank that no later message uses the segment, see Channel.drop. Raises as `send` does."""
        self._raise_error()
        with self._in_order(), contextlib.suppress(OSError):
            self.ranks.channels[rank].drop(segment.number)

    def forget(self, rank: int, segment: Segment) -> None:
        """Drop the segment without a message, see Channel.forget. Works also after the pool has failed."""
        self.ranks.channels[rank].forget(segment.number)

    def ask(self, message: Any, reply: type, model: int | None = None, ranks: Sequence[int] | None = None) -> Future:
        """Send a message to `ranks`, or to all ranks. Returns the future of their replies, which are of type `reply`
        (Gathers.open)."""
        return self.ask_each([message] * len(self.devices if ranks is None else ranks), reply, model, ranks)

    def ask_each(
        self, messages: Sequence[Any], reply: type, model: int | None = None, ranks: Sequence[int] | None = None
    ) -> Future:
        """Like `ask`, but with a separate message for each rank."""
        every = range(len(self.devices))
        asked = every if ranks is None else ranks
        told = set(every) - set(asked) if isinstance(messages[0], KNOWN_TO_ALL) else ()
        request_id, future = self._gathers.open(reply, asked)
        try:
            with self._in_order():
                for rank, message in zip(asked, messages, strict=True):
                    self._send(rank, message, request_id, model)
                for rank in told:
                    self._send(rank, messages[0], None, model)
        except BaseException:
            self._gathers.drop(request_id)
            raise
        return future

    def tell(self, message: Any, model: int | None = None, ranks: Sequence[int] | None = None) -> None:
        """Send a message to `ranks`, or to all ranks, without waiting for replies."""
        told = range(len(self.devices)) if ranks is None or isinstance(message, KNOWN_TO_ALL) else ranks
        self.send_each(((rank, message) for rank in told), None, model)

    def refuse(self, rank: int, why: str) -> Exception:
        """End the pool because the rank sent an invalid message. Returns the error for the caller to raise."""
        return self.error or self._fail(self._failures.refusal(rank, why))

    def close(self, politely: bool = True) -> None:
        """End all ranks, and return once they have ended, at most END_SECONDS after the call. May be called repeatedly.

        `politely`: ask the ranks to end before killing them. False: kill at once, since ranks that load read no messages.
        """
        with self._claiming:
            first, self._closing = not self._closing, True
        if not first:
            if threading.current_thread() is not self._receiver:  # it is the one that ends them, or that would be joined
                self._gone.wait(END_SECONDS)
            return
        if politely:
            self._watchdog_thread.end(stop_ranks=True)
            self.ranks.join(STOP_SECONDS)
        self._end(RankError("Parallel DiT: the ranks were ended"))

    def _raise_error(self) -> None:
        if self.error is not None:
            raise again(self.error)

    def _fail(self, error: Exception) -> Exception:
        """End the pool and return its error: that of the watchdog if there is one, else `error`."""
        error = self._watchdog_thread.error or error
        log.warning("%s", str(error).partition("\n")[0])
        self._end(error)
        return error

    def _end(self, error: Exception) -> None:
        """Kill all ranks, and let everything that waits for them fail with `error`."""
        self._closing = True
        self._watchdog_thread.end()
        try:
            # Before any lock of a model is taken: its holder may be blocked in a send, which the kill ends.
            self.ranks.kill()
            # Both threads end before the connections that they use are closed.
            self._watchdog_thread.join(STOP_SECONDS)
            if self._receiver is not threading.current_thread():
                self._receiver.join(STOP_SECONDS)
            for channel in self.ranks.channels:
                channel.close()
        finally:  # even if the system refuses to end a process, all waits end
            self.error = error
            # Before the models' locks are taken: a holder of one may be waiting in `close`.
            self._gone.set()
            self._gathers.fail(error)
            for model in list(self._models.values()):
                model.on_failure(error)

    def _receive_all(self) -> None:
        """Main function of the receiving thread. An exception in it ends the pool, or callers would wait for ever."""
        try:
            self._receive_until_end()
        except Exception as error:
            if not self._closing:
                self._fail(error)
            raise

    def _receive_until_end(self) -> None:
        """Forward messages, record ranks that have ended, and end the pool once the cause of a failure is known."""
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
            elif self._failures.pending and (cause := self._failures.root_cause()) is not None:
                self._fail(cause)

    def _receive_from(self, rank: int) -> bool:
        """Receive one message and forward it. Returns False if the connection has ended."""
        self.watchdog.receiving = rank
        try:
            envelope = self.ranks.channels[rank].receive()
        except (EOFError, OSError):
            return False
        finally:
            self.watchdog.receiving = None
        self._hand_on(rank, *envelope)
        return True

    def _hand_on(self, rank: int, message: Any, request_id: int | None, model: int | None) -> None:
        if getattr(message, "rank", None) != rank:
            raise m.BadMessage(f"{type(message).__name__} in the name of rank {getattr(message, 'rank', None)}")
        self.watchdog.heard(rank, message, model)
        match message:
            case m.Output() | m.Loading():
                if model is None or model > self._newest:
                    raise m.BadMessage(f"{type(message).__name__} about a model that was never loaded")
                if (listener := self._models.get(model)) is None:  # the model has been let go meanwhile
                    return
                if rank not in listener.part_ranks:
                    raise m.BadMessage(f"{type(message).__name__} from a rank that does not have the model")
                message = replace(message, rank=listener.part_ranks.index(rank))
                if isinstance(message, m.Output):
                    listener.on_output(message)
                else:
                    listener.on_loading(message)
            case m.Failure():
                self._failures.note_failure(message)
            case m.Ready():
                self._gathers.add(self._start_id, rank, message)
            case _:
                self._gathers.add(request_id, rank, message)
