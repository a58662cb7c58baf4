"""A rank's heartbeat: what it is doing, and a count that grows with all that it gets done (see watchdog.py)."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .channel import Channel
from .lifecycle import START_UP, HeartbeatMessage


@dataclass
class Heartbeat:
    """Written by the rank's main thread alone.

    `doing`: in the words of an error. `waiting`: the rank stands still for another one, in a transfer.
    """

    doing: str = START_UP
    progress: int = 0
    waiting: bool = False

    def done(self) -> None:
        """Something is: a message handled, a block computed, a transfer waited for, a tensor loaded."""
        self.progress += 1

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Around what cannot end before other ranks do their part."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
        self.progress += 1


def send_heartbeats(heartbeat: Heartbeat, rank: int, channel: Channel, seconds: float) -> None:
    """A thread's whole life: a HeartbeatMessage every so many seconds, whatever the main thread does."""
    with contextlib.suppress(OSError):  # the client is gone, and the control thread ends this process
        while True:
            channel.send(HeartbeatMessage(rank, heartbeat.doing, heartbeat.progress, heartbeat.waiting))
            time.sleep(seconds)
