"""What a rank is started with."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from parallel_backend.core.devices import in_its_process


@dataclass(frozen=True)
class RankSettings:
    """What a rank is started with. `threads`: CPU threads it may use.

    `rendezvous`: the process group's store, a file on one machine, or the address of a server that several reach.

    `slowdown`: 2 makes it take twice its time to compute, which stands in for a slower device in tests and benchmarks.
    `log`: the file that takes what it prints; None leaves that where it goes. `heartbeat_seconds`: between its heartbeats.
    """

    rank: int
    devices: tuple[str, ...]
    rendezvous: Path | tuple[str, int]
    threads: int
    timeout: timedelta
    slowdown: float
    log: Path | None = None
    heartbeat_seconds: float = 1.0

    @property
    def device(self) -> str:
        """The rank's own, as torch calls it in this process."""
        return in_its_process(self.devices[self.rank])
