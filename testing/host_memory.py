"""Host memory that several processes take together, by Linux's account."""

from collections.abc import Iterable
from pathlib import Path


def held_bytes(pids: Iterable[int]) -> int:
    """Of memory that the system cannot take back: anonymous memory, and memory shared without a file, of which each process
    has its share (PSS), so that it counts once.

    Pages of mapped files are left out: they are the system's page cache, one copy whoever has mapped it, and go when memory
    is needed. ProcessLookupError for one that is gone.
    """
    return sum(_rollup(pid, "Pss_Anon") + _rollup(pid, "Pss_Shmem") for pid in pids)


def mapped_bytes(pids: Iterable[int]) -> int:
    """Of pages of files, libraries among them: each process's share."""
    return sum(_rollup(pid, "Pss_File") for pid in pids)


def _rollup(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]
    if not sizes:  # it has ended, and its parent has not looked yet
        raise ProcessLookupError(pid)
    return sizes[0]
