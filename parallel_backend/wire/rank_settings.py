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
    rank: int
    devices: tuple[str, ...]
    """Devices of all ranks, in rank order."""
    rendezvous: Path | tuple[str, int]
    """The process group's store: a file on one machine, or the address of a server that several machines reach."""
    threads: int
    """CPU threads that the rank may use."""
    timeout: timedelta
    """Of the process group's operations."""
    log: Path | None = None
    """File for what the rank prints. None: that goes where the client's output goes."""
    heartbeat_seconds: float = 1.0
    """Time from one heartbeat to the next."""
    self_test: SelfTest = SELF_TEST

    @property
    def device(self) -> str:
        """The rank's own device, by torch's name in this process."""
        return in_its_process(self.devices[self.rank])
