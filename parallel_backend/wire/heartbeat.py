"""A rank's heartbeat: what the rank is doing, and a count of what it has done. The watchdog judges by it (watchdog.py).

On CUDA the host runs ahead of its device, and is idle or in a later micro-step while the device is stuck in this one. There
the main thread leaves marks in the device's work, and the heartbeat says where the device is among them.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .channel import Channel
from .lifecycle import START_UP, HeartbeatMessage

MARKS = 1 << 14
"""Marks that are kept. A host is some micro-steps ahead at most, with a few marks for each of their transfers."""


@dataclass(frozen=True)
class Mark:
    """A point in the device's work, and what the device does from there on."""

    passed: Callable[[], bool]
    """Whether the device has come there. It never waits. RuntimeError where the device has failed."""
    doing: str | None
    """As Heartbeat.doing. None: nothing, up to the next mark."""
    waiting: bool
    """The device waits for another rank, in a transfer."""


@dataclass
class Heartbeat:
    """Written by the rank's main thread only, but for what `beat` counts."""

    doing: str = START_UP
    """What the rank is doing, as an error says it."""
    progress: int = 0
    """Counts what is done: messages handled, blocks computed, transfers waited for, tensors loaded."""
    waiting: bool = False
    """The rank waits for another rank, in a transfer."""
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))
    """The device has not been seen to have passed them."""
    _at: Mark | None = None
    """The last mark that the device was seen to have passed."""
    _passed: int = 0
    """Counts the marks that the device has passed."""

    def mark(self, passed: Callable[[], bool], waiting: bool = False, idle: bool = False) -> None:
        """From this point on the device does what the rank is doing now: see Mark. `idle`: it has done all of it."""
        self._marks.append(Mark(passed, None if idle else self.doing, waiting))

    def beat(self, rank: int) -> HeartbeatMessage:
        """What the device does, as long as it has something to do, else what the host does. On one thread only."""
        while self._marks and _has_passed(self._marks[0]):
            self._at = self._marks.popleft()
            self._passed += 1
        progress = self.progress + self._passed
        if not self._marks:
            return HeartbeatMessage(rank, self.doing, progress, self.waiting)
        at, following = self._at, self._marks[0]
        if at is None or at.doing is None:  # it is on the way to its next work
            return HeartbeatMessage(rank, following.doing or self.doing, progress, False)
        return HeartbeatMessage(rank, at.doing, progress, at.waiting)

    def done(self) -> None:
        """Count one more in `progress`."""
        self.progress += 1

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Context of an operation that ends only when other ranks take part: `waiting` is set."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
        self.progress += 1


def send_heartbeats(heartbeat: Heartbeat, rank: int, channel: Channel, seconds: float) -> None:
    """Main function of a thread: sends a HeartbeatMessage every `seconds`, whatever the main thread does."""
    with contextlib.suppress(OSError):  # the client is gone, and the control thread ends this process
        while True:
            channel.send(heartbeat.beat(rank))
            time.sleep(seconds)


def _has_passed(mark: Mark) -> bool:
    """No for a device that has failed: the main thread meets the same error, and reports it."""
    try:
        return mark.passed()
    except RuntimeError:
        return False
