"""A rank's heartbeat: what the rank is doing, and how much it has done. The watchdog judges by heartbeats (watchdog.py).

On CUDA the host runs ahead of its device: the host may be idle while the device is stuck in an earlier micro-step. So the
main thread records marks (CUDA events) between the device's operations, and the heartbeat says which marks the device has
passed.

A query of the device's driver may block as long as another thread of the rank does: if the queue is full, the first launch
of a kernel holds the driver's lock. So one thread queries the driver, and another sends the last known state, with the time
for which the driver has not answered.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from .channel import Channel
from .lifecycle import START_UP, HeartbeatMessage

ASKING_THREAD = "device"
"""Name of the thread that queries the driver."""
MARKS = 1 << 14
"""Maximum number of marks that are stored. The host is at most a few micro-steps ahead, with several marks for each of their
transfers."""


@dataclass(frozen=True)
class Mark:
    """A point between the device's operations, and the work that the device does after it."""

    passed: Callable[[], bool]
    """Returns whether the device has passed the point. Waits only for the driver. Raises RuntimeError if the device has
    failed."""
    doing: str | None
    """The work after the mark, as Heartbeat.doing. None: the device does nothing until the next mark."""
    waiting: bool
    """Whether the device then waits for another rank, in a transfer."""


@dataclass(frozen=True)
class Seen:
    """An answer of the device's driver."""

    at: Mark | None = None
    """The last mark that the device has passed. None: it has passed none."""
    next: Mark | None = None
    """The first mark that it has not passed. None: it has passed all."""
    passed: int = 0
    """The number of marks that it has passed."""
    memory: tuple[int, int] = (0, 0)
    """Free and total memory in bytes, from the last query."""


@dataclass
class Heartbeat:
    """The state of a rank. The main thread writes all of it except `_seen` and `_asked`, which `ask` writes."""

    doing: str = START_UP
    """What the rank is doing now, as text for an error."""
    progress: int = 0
    """The number of messages handled, blocks computed, transfers waited for and tensors loaded so far."""
    waiting: bool = False
    """Whether the rank is waiting for another rank, in a transfer."""
    run_bytes: int = 0
    """Bytes that all models' K/V buffers and prompts take on the rank's device."""
    memory: Callable[[], tuple[int, int]] | None = None
    """Returns free and total memory of the rank's device. `ask` calls it; after an exception the last answer stays. None:
    the rank does not have its device yet."""
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))
    """Marks that the device has not passed, as far as is known."""
    _seen: Seen = Seen()
    _asked: float | None = None
    """When the present query of the driver began, by time.monotonic. None: there is none."""
    _asking: threading.Lock = field(default_factory=threading.Lock)
    """Held while the driver is queried, and while it must not be."""

    def mark(self, passed: Callable[[], bool], waiting: bool = False, idle: bool = False) -> None:
        """Record a mark after the device's work so far. After it the device does the rank's present work, or nothing if
        `idle`."""
        self._marks.append(Mark(passed, None if idle else self.doing, waiting))

    def ask(self) -> None:
        """Query the driver for the device's progress and memory. Blocks as long as the driver does. Must be called on one
        thread only, and never on the thread that calls `beat`."""
        with self._asking:
            self._asked = time.monotonic()
            try:
                self._seen = replace(self._seen, next=self._next())
                while self._marks and _has_passed(self._marks[0]):
                    at = self._marks.popleft()
                    self._seen = replace(self._seen, at=at, next=self._next(), passed=self._seen.passed + 1)
                if self.memory is not None:
                    # Who computes on a failed device reports it. A thread that ended here would ask no more.
                    with contextlib.suppress(Exception):
                        self._seen = replace(self._seen, memory=self.memory())
            finally:
                self._asked = None

    def beat(self, rank: int) -> HeartbeatMessage:
        """Return a heartbeat with the device's work, or else the host's, from the driver's last answer. Never waits."""
        seen, asked = self._seen, self._asked
        progress = self.progress + seen.passed
        rest = (*seen.memory, self.run_bytes, 0.0 if asked is None else time.monotonic() - asked)
        if seen.next is None:
            return HeartbeatMessage(rank, self.doing, progress, self.waiting, *rest)
        if seen.at is None or seen.at.doing is None:  # the device is about to begin the work behind the next mark
            return HeartbeatMessage(rank, seen.next.doing or self.doing, progress, False, *rest)
        return HeartbeatMessage(rank, seen.at.doing, progress, seen.at.waiting, *rest)

    def unasked(self) -> AbstractContextManager[Any]:
        """Context in which the driver is not queried; heartbeats continue. Waits for a query in progress. On ROCm a query
        from another thread makes a graph capture invalid in every mode (pytorch issue 177309)."""
        return self._asking

    def _next(self) -> Mark | None:
        return self._marks[0] if self._marks else None

    def done(self) -> None:
        """Add 1 to `progress`."""
        self.progress += 1

    @contextlib.contextmanager
    def within(self, doing: str) -> Iterator[None]:
        """Context in which heartbeats report `doing`. Afterwards they report the previous work again."""
        before, self.doing = self.doing, f"{doing} ({self.doing})"
        try:
            yield
        finally:
            self.doing = before

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Context for an operation that ends only when other ranks take part in it. Sets `waiting`."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
        self.progress += 1


def send_heartbeats(heartbeat: Heartbeat, rank: int, channel: Channel, seconds: float) -> None:
    """Main function of a thread: send a HeartbeatMessage every `seconds`, even if the main thread or the driver is stuck."""
    ended = threading.Event()
    threading.Thread(target=_ask_on, args=(heartbeat, seconds, ended), name=ASKING_THREAD, daemon=True).start()
    try:
        with contextlib.suppress(OSError):  # the client is gone: the control thread ends this process
            while True:
                channel.send(heartbeat.beat(rank))
                time.sleep(seconds)
    finally:
        ended.set()


def _ask_on(heartbeat: Heartbeat, seconds: float, ended: threading.Event) -> None:
    """Main function of the thread that queries the driver. Nothing waits for its end, which a driver may delay."""
    while not ended.is_set():
        heartbeat.ask()
        ended.wait(seconds)


def _has_passed(mark: Mark) -> bool:
    """Return whether the device has passed the mark; False if it has failed, because the main thread then reports the
    error."""
    try:
        return mark.passed()
    except RuntimeError:
        return False
