"""The settings with which a rank's process is started."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from parallel_backend.core.devices import in_its_process

P2P_DISABLE, P2P_LEVEL = P2P_VARIABLES = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"
"""NCCL's environment variables for direct access between GPUs (P2P): whether it is off, and between which GPUs it is on.
Users may set them too."""


@dataclass(frozen=True)
class Transport:
    """How ranks on GPUs transfer."""

    name: str
    """For files and reports."""
    variables: tuple[tuple[str, str], ...] = ()
    """NCCL's environment variables."""
    gloo: bool = False
    """True: by Gloo instead of NCCL."""


BY_NCCL = Transport("NCCL")
"""NCCL decides which pairs of GPUs have P2P: by default those below one PCIe switch, and those with NVLink."""
P2P_EVERYWHERE = Transport("P2P between all GPUs", ((P2P_LEVEL, "SYS"),))
P2P_OVER_NVLINK = Transport("P2P over NVLink alone", ((P2P_LEVEL, "NVL"),))
WITHOUT_P2P = Transport("no P2P", ((P2P_DISABLE, "1"),))
BY_GLOO = Transport("Gloo", gloo=True)
TRANSPORTS = {one.name: one for one in (BY_NCCL, P2P_EVERYWHERE, P2P_OVER_NVLINK, WITHOUT_P2P, BY_GLOO)}


@dataclass(frozen=True)
class SelfTest:
    """Settings of the self-test of the links between ranks (rank/comm/self_test.py)."""

    seconds: float = 60.0
    """Time limit of each part of the test in seconds."""
    transport: Transport = BY_NCCL


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
