"""Where a rank's process starts. The client imports this module too, so it imports nothing heavy itself."""

import gc
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from .device_names import in_its_process
from .hidden import hidden
from .orphan import end_with_parent
from .rank_log import write_log


@dataclass(frozen=True)
class RankSettings:
    """What a rank is started with. `threads`: CPU threads it may use.

    `rendezvous`: the process group's store, a file on one machine, or the address of a server that several reach.

    `slowdown`: 2 makes it take twice its time to compute, which stands in for a slower device in tests and benchmarks.
    `log`: the file that takes what it prints; None leaves that where it goes. `beat`: seconds between its signs of life.
    """

    rank: int
    devices: tuple[str, ...]
    rendezvous: Path | tuple[str, int]
    threads: int
    timeout: timedelta
    slowdown: float
    log: Path | None = None
    beat: float = 1.0

    @property
    def device(self) -> str:
        """The rank's own, as torch calls it in this process."""
        return in_its_process(self.devices[self.rank])


def main(settings: RankSettings, connection: Connection) -> None:
    """Entry of a spawned process: found under this plain module name, whatever name ComfyUI imported the pack by."""
    if isinstance(settings.rendezvous, Path):
        end_with_parent(settings.rendezvous.parent)
    if settings.log is not None:
        write_log(settings.log, f"rank {settings.rank} ({settings.devices[settings.rank]})")
    # What diffusers' schedulers and pipelines want, and no rank has: a third of its start inside ComfyUI.
    with hidden("scipy", "transformers"):
        import diffusers.utils  # noqa: F401  # looks for what is installed, once for all
    from .worker import run

    gc.freeze()  # 300,000 objects of torch and diffusers, which every collection would go through: 0.25 s at each unloading
    run(settings, connection)
