"""Messages about a rank's process: start, heartbeat, unloading, failure, end."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """Rank -> client: the process has started and joined its process group."""

    rank: int


START_UP, IDLE, COMPILING = "start-up", "idle", "compiling"
"""Values of HeartbeatMessage.doing: before a rank's first message, between messages, and while torch.compile creates a
graph."""


@dataclass(frozen=True)
class HeartbeatMessage:
    """Rank -> client, about once a second as long as the process runs. The fields are described in heartbeat.Heartbeat."""

    rank: int
    doing: str
    progress: int
    waiting: bool
    free_bytes: int = 0
    """Free memory of the rank's device, or of the machine for a CPU rank."""
    total_bytes: int = 0
    """Total size of that memory. 0: not known yet."""
    run_bytes: int = 0
    unanswered: float = 0.0
    """Seconds for which the device's driver has not answered a query. What the message says about the device is as old."""


@dataclass(frozen=True)
class Unload:
    """Client -> rank: free the model, its conditionings and its buffers."""


@dataclass(frozen=True)
class Unloaded:
    """Rank -> client: the model, its conditionings and its buffers have been freed."""

    rank: int


@dataclass(frozen=True)
class Failure:
    """Rank -> client: the rank has failed and is about to end."""

    rank: int
    doing: str
    """The rank's work when it failed, as HeartbeatMessage.doing."""
    peer: bool
    """Whether the rank failed in a transfer, so that another rank may be the cause."""
    summary: str
    """Type and text of the exception."""
    traceback: str
    transport: str = ""
    """The backend, nccl or gloo, whose self-test failed. Empty: something else failed."""


@dataclass(frozen=True)
class Stop:
    """Client -> rank: end the process."""
