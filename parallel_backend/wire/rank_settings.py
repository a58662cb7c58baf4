"""The settings that a rank's process is started with."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from parallel_backend.core.devices import in_its_process

P2P_DISABLE = "NCCL_P2P_DISABLE"
"""NCCL's environment variable, which users may set too."""


@dataclass(frozen=True)
class SelfTest:
    """Of the links between ranks (rank/comm/self_test.py)."""

    seconds: float = 60.0
    """Limit of each of its parts."""
    p2p: bool = True
    """False: NCCL does without direct access from GPU to GPU, which is what fails most."""


SELF_TEST = SelfTest()
"""What ranks are started with, unless a test or the registry wants another."""


@dataclass(frozen=True)
class RankSettings:
    """Of one rank. What all have alike: see StartSettings."""

    rank: int
    devices: tuple[str, ...]
    rendezvous: Path | tuple[str, int]
    """The process group's store: a file on one machine, or the address of a server that several machines reach."""
    threads: int
    timeout: timedelta
    log: Path | None = None
    """File for what the rank prints. None: that goes where the client's output goes."""
    heartbeat_seconds: float = 1.0
    self_test: SelfTest = SELF_TEST

    @property
    def device(self) -> str:
        """The rank's own device, by torch's name in this process."""
        return in_its_process(self.devices[self.rank])


@dataclass(frozen=True)
class StartSettings:
    """Which ranks to start, and with what: see pool.Pool."""

    devices: tuple[str, ...]
    """Devices of all ranks, in rank order."""
    threads: int
    """CPU threads that each rank may use."""
    timeout: timedelta
    """Of the process group's operations."""
    logs: Path | None = None
    heartbeat_seconds: float = 1.0
    """Time from one heartbeat to the next."""
    self_test: SelfTest = SELF_TEST

    def of_rank(self, rank: int, rendezvous: Path | tuple[str, int], log: Path | None = None) -> RankSettings:
        """See RankSettings."""
        alike = self.heartbeat_seconds, self.self_test
        return RankSettings(rank, self.devices, rendezvous, self.threads, self.timeout, log, *alike)
