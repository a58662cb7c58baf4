"""ComfyUI's process, its ranks, and what they hold."""

import contextlib
from pathlib import Path

import psutil

from scripts.comfyui_server import ComfyUIServer
from testing.host_memory import held_bytes
from tests.comfyui.conftest import ranks

from .record import SERVER, Reading

END_SECONDS = 10.0


class Watch:
    """Reads the processes of a server, and remembers all that it has ever seen of them. `temporary`: their TMPDIR."""

    def __init__(self, server: ComfyUIServer, temporary: Path):
        self.server, self.temporary = server, temporary
        self.main = psutil.Process(server.process.pid)
        self.seen: dict[int, psutil.Process] = {self.main.pid: self.main}

    def ranks(self) -> list[psutil.Process]:
        """In the order of their numbers."""
        found = ranks(self.server)
        self.seen |= {process.pid: process for process in self.main.children(recursive=True)}
        return found

    def read(self, number: int, state: str) -> list[Reading]:
        """One of ComfyUI and one of each rank. Ranks that are just ending are left out."""
        files = len(list(self.temporary.iterdir()))
        found = []
        for role, process in [(SERVER, self.main), *((f"rank {index}", rank) for index, rank in enumerate(self.ranks()))]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                counts = process.num_fds(), process.num_threads(), files
                found.append(Reading(number, state, role, process.pid, held_bytes((process.pid,)), *counts))
        return found

    def left(self) -> list[str]:
        """What remains of them once the server has been stopped."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=END_SECONDS)
        processes = [f"process {process.pid}: {' '.join(process.cmdline())[:200]}" for process in alive]
        files = [f"temporary file {path.name}" for path in sorted(self.temporary.iterdir())]
        return processes + files
