"""Where a rank's process starts. The client imports this module too, so it imports nothing heavy itself."""

from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass(frozen=True)
class RankSettings:
    """What a rank is started with. `threads`: CPU threads it may use. `rendezvous`: the process group's store file.

    `slowdown`: 2 makes it take twice its time to compute, which stands in for a slower device in tests and benchmarks.
    """

    rank: int
    devices: tuple[str, ...]
    rendezvous: Path
    threads: int
    timeout: timedelta
    slowdown: float


def main(settings: RankSettings, connection: Connection) -> None:
    """Entry of a spawned process: found under this plain module name, whatever name ComfyUI imported the pack by."""
    from .worker import run

    run(settings, connection)
