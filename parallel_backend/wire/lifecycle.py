"""Messages about a rank's process: start, heartbeat, unloading, failure, end."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """Rank -> client: the process has started and joined its process group."""

    rank: int


START_UP, IDLE, COMPILING = "start-up", "idle", "compiling"
"""HeartbeatMessage.doing of a rank before its first message, between messages, and while torch.compile makes a graph."""


@dataclass(frozen=True)
class HeartbeatMessage:
    """Rank -> client, about every second as long as the process runs. Fields: see heartbeat.Heartbeat."""

    rank: int
    doing: str
    progress: int
    waiting: bool
    free_bytes: int = 0
    """Free memory of the rank's device; of a CPU rank's machine."""
    total_bytes: int = 0
    """All of that memory. 0: not known yet."""
    run_bytes: int = 0
    unanswered: float = 0.0
    """Seconds for which the driver of the rank's device has not answered a question. What is said of the device is older."""


@dataclass(frozen=True)
class Unload:
    """Client -> rank: free the model, its conditionings and its buffers."""


@dataclass(frozen=True)
class Unloaded:
    """Rank -> client: the model, its conditionings and its buffers are freed."""

    rank: int


@dataclass(frozen=True)
class Failure:
    """Rank -> client: the rank has failed, and is about to end."""

    rank: int
    doing: str
    """As HeartbeatMessage.doing."""
    peer: bool
    """The rank failed in a transfer, so another rank may be the cause."""
    summary: str
    """Type and text of the exception."""
    traceback: str
    transport: str = ""
    """The backend whose self-test failed, nccl or gloo. Empty: another failure."""


@dataclass(frozen=True)
class Stop:
    """Client -> rank: end the process."""
