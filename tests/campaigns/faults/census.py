"""What a process has at a moment, and what it has kept that it should not have."""

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Census:
    """`files`: in the folder for temporary ones. `descriptors`: how many this process has open."""

    children: frozenset[int]
    threads: tuple[str, ...]
    descriptors: int
    listening: frozenset[tuple]
    files: frozenset[str]
    shared: frozenset[str]


def take(folder: Path) -> Census:
    gc.collect()  # what an error's traceback holds on to
    own = psutil.Process()
    listening = {tuple(c.laddr) for c in own.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return Census(
        frozenset(child.pid for child in own.children(recursive=True)),
        tuple(sorted(thread.name for thread in threading.enumerate())),
        own.num_fds(),
        frozenset(listening),
        frozenset(entry.name for entry in folder.iterdir()),
        frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else frozenset(),
    )


def left_over(before: Census, after: Census, exchanged: Counter[str]) -> list[str]:
    """What is in `after` and was not in `before`, in words. `exchanged`: how many of each may have been replaced.

    Both are of moments with as many ranks, so there is one for one: a new pool's processes and directory for an old one's.
    """
    found = []
    if len(new := after.children - before.children) > exchanged["children"] or len(after.children) > len(before.children):
        found.append(f"processes {sorted(new)}")
    if added := Counter(after.threads) - Counter(before.threads):
        found.append(f"threads {sorted(added.elements())}")
    if after.descriptors > before.descriptors:
        found.append(f"{after.descriptors - before.descriptors} open files")
    if new := after.listening - before.listening:
        found.append(f"listening sockets {sorted(new)}")
    if len(new := after.files - before.files) > exchanged["files"] or len(after.files) > len(before.files):
        found.append(f"temporary files {sorted(new)}")
    if new := {name for name in after.shared - before.shared if not _is_of_others(name)}:
        found.append(f"shared memory {sorted(new)}")
    return found


def settle(look: Callable[[], list[str]], seconds: float) -> list[str]:
    """What `look` finds, once it finds nothing or time is up: the system takes a moment to clear up."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _is_of_others(name: str) -> bool:
    """A segment of shared memory that a process which is none of ours has open: other programs use the folder too."""
    path = str(SHARED_MEMORY / name)
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(entry.path == path for entry in process.open_files()):
                return True
    return not Path(path).exists()
