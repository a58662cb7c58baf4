"""A rank's heartbeat: what the rank is doing, and a count of what it has done. The watchdog judges by it (watchdog.py)."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .channel import Channel
from .lifecycle import START_UP, HeartbeatMessage


@dataclass
class Heartbeat:
    """Written by the rank's main thread only."""

    doing: str = START_UP
    """What the rank is doing, as an error says it."""
    progress: int = 0
    """Counts what is done: messages handled, blocks computed, transfers waited for, tensors loaded."""
    waiting: bool = False
    """The rank waits for another rank, in a transfer."""

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
            channel.send(HeartbeatMessage(rank, heartbeat.doing, heartbeat.progress, heartbeat.waiting))
            time.sleep(seconds)
