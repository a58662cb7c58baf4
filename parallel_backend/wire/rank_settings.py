"""The settings with which a rank's process is started."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from parallel_backend.core.devices import in_its_process

P2P_DISABLE = "NCCL_P2P_DISABLE"
"""NCCL's environment variable for switching P2P off. Users may set it too."""


@dataclass(frozen=True)
class SelfTest:
    """Settings of the self-test of the links between ranks (rank/comm/self_test.py)."""

    seconds: float = 60.0
    """Time limit of each part of the test in seconds."""
    p2p: bool = True
    """False: NCCL uses no direct access between GPUs, which is the most frequent cause of failures."""
    gloo: bool = False
    """True: Gloo is used instead of NCCL."""


SELF_TEST = SelfTest()
"""The default settings."""


@dataclass(frozen=True)
class StartSettings:
    """Settings of all ranks of a pool."""

    devices: tuple[str, ...]
    """Devices of all ranks, in rank order."""
    threads: int
    """The number of CPU threads of each rank."""
    timeout: timedelta
    """Time limit of the process group's operations."""
    logs: Path | None = None
    """Folder for the ranks' logs, see pool.Pool."""
    heartbeat_seconds: float = 1.0
    """Seconds from one heartbeat to the next."""
    self_test: SelfTest = SELF_TEST
    torch_settings: dict[str, bool | str] = field(default_factory=dict)
    """Settings of torch in the ranks, see core/torch_settings.py."""

    def of_rank(self, rank: int, rendezvous: Path | tuple[str, int], log: Path | None = None) -> "RankSettings":
        return RankSettings(**vars(self), rank=rank, rendezvous=rendezvous, log=log)


@dataclass(frozen=True, kw_only=True)
class RankSettings(StartSettings):
    """Settings of one rank."""

    rank: int
    rendezvous: Path | tuple[str, int]
    """The process group's store: a file if all ranks are on one machine, or the address of a server that all machines
    reach."""
    log: Path | None = None
    """File for the rank's output. None: the output goes to the client's output."""

    @property
    def device(self) -> str:
        """The rank's device, by the name that torch gives it in the rank's process."""
        return in_its_process(self.devices[self.rank])
