"""A rank's heartbeat: what the rank is doing, and how much it has done. The watchdog judges by heartbeats (watchdog.py).

On CUDA the host runs ahead of its device: the host may be idle while the device is stuck in an earlier micro-step. So the
main thread puts marks (CUDA events) between the device's operations, and the heartbeat says which marks the device passed.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from .channel import Channel
from .lifecycle import START_UP, HeartbeatMessage

MARKS = 1 << 14
"""Most marks that are kept. The host is a few micro-steps ahead at most, with some marks for each of their transfers."""


@dataclass(frozen=True)
class Mark:
    """A point between the device's operations, and the work of the device behind it."""

    passed: Callable[[], bool]
    """Whether the device has passed the point. Never waits. RuntimeError if the device has failed."""
    doing: str | None
    """As Heartbeat.doing. None: the device does nothing up to the next mark."""
    waiting: bool
    """The device waits for another rank, in a transfer."""


@dataclass
class Heartbeat:
    """The state of a rank. The main thread writes it, but for `_at`, `_passed` and `_memory`, which `beat` writes."""

    doing: str = START_UP
    """The rank's present work, in the words of an error."""
    progress: int = 0
    """Number of messages handled, blocks computed, transfers waited for and tensors loaded so far."""
    waiting: bool = False
    """The rank waits for another rank, in a transfer."""
    run_bytes: int = 0
    """Bytes on the rank's device of all models' K/V buffers and prompts."""
    memory: Callable[[], tuple[int, int]] | None = None
    """Returns free and all memory of the rank's device. Called on the thread of `beat`, which keeps the last answer
    after an exception. None: the rank has not got its device yet."""
    _memory: tuple[int, int] = (0, 0)
    """As of the last beat that asked."""
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))
    """Marks that the device has not passed yet."""
    _at: Mark | None = None
    """The last mark that the device has passed."""
    _passed: int = 0
    """Number of marks that the device has passed."""
    _asking: threading.Lock = field(default_factory=threading.Lock)
    """Held while marks are asked, and while they may not be."""

    def mark(self, passed: Callable[[], bool], waiting: bool = False, idle: bool = False) -> None:
        """Put a mark behind the device's work so far: from there on it does the rank's present work; if `idle`, nothing."""
        self._marks.append(Mark(passed, None if idle else self.doing, waiting))

    def beat(self, rank: int) -> HeartbeatMessage:
        """The device's work while it has some, else the host's. To be called on one thread only."""
        if self._asking.acquire(blocking=False):  # a beat that waited for a capture would be missed
            try:
                while self._marks and _has_passed(self._marks[0]):
                    self._at = self._marks.popleft()
                    self._passed += 1
                if self.memory is not None:
                    # Who computes on a failed device reports it. A thread that ended here would have a rank taken for dead.
                    with contextlib.suppress(Exception):
                        self._memory = self.memory()
            finally:
                self._asking.release()
        progress, memory = self.progress + self._passed, (*self._memory, self.run_bytes)
        if not self._marks:
            return HeartbeatMessage(rank, self.doing, progress, self.waiting, *memory)
        at, following = self._at, self._marks[0]
        if at is None or at.doing is None:  # the device is about to begin the work behind the next mark
            return HeartbeatMessage(rank, following.doing or self.doing, progress, False, *memory)
        return HeartbeatMessage(rank, at.doing, progress, at.waiting, *memory)

    def unasked(self) -> AbstractContextManager[Any]:
        """Context in which no mark is asked whether the device has passed it; beats go on. Waits for a question under way.

        On ROCm a question of another thread makes a capture invalid, whatever its mode is (pytorch's issue 177309).
        """
        return self._asking

    def done(self) -> None:
        """Add 1 to `progress`."""
        self.progress += 1

    @contextlib.contextmanager
    def within(self, doing: str) -> Iterator[None]:
        """Context in which the present work is said to be `doing`, of what it was before."""
        before, self.doing = self.doing, f"{doing} ({self.doing})"
        try:
            yield
        finally:
            self.doing = before

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Context of an operation that ends only when other ranks take part in it. Sets `waiting`."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
        self.progress += 1


def send_heartbeats(heartbeat: Heartbeat, rank: int, channel: Channel, seconds: float) -> None:
    """Main function of a thread: sends a HeartbeatMessage every `seconds`, whatever the main thread does."""
    with contextlib.suppress(OSError):  # the client is gone: the control thread ends this process
        while True:
            channel.send(heartbeat.beat(rank))
            time.sleep(seconds)


def _has_passed(mark: Mark) -> bool:
    """False for a device that has failed: the main thread meets the same error, and reports it."""
    try:
        return mark.passed()
    except RuntimeError:
        return False
