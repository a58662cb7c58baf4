"""Messages of a rank's life: start, heartbeat, unloading, failure, end."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """Rank -> client: the process is up and has joined its group."""

    rank: int


START_UP, IDLE = "start-up", "idle"
"""What a rank is doing when it does nothing that a message told it to."""


@dataclass(frozen=True)
class HeartbeatMessage:
    """Rank -> client, about every second as long as the process runs: see heartbeat.Heartbeat."""

    rank: int
    doing: str
    progress: int
    waiting: bool


@dataclass(frozen=True)
class Unload:
    """Client -> rank: drop the model and everything that belongs to it."""


@dataclass(frozen=True)
class Unloaded:
    rank: int


@dataclass(frozen=True)
class Failure:
    """Rank -> client: the rank is about to end. `peer`: it failed in a transfer, so the cause may lie with another rank."""

    rank: int
    doing: str
    peer: bool
    summary: str
    traceback: str


@dataclass(frozen=True)
class Stop:
    """Client -> rank: end the process."""
