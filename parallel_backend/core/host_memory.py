"""Free memory of this machine, or of the container in which this process runs."""

import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from .control_groups import CONTROL_GROUPS, MEMBERSHIP, groups
from .device_copies import page_locked

UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number above this if there is no limit."""
LEFT_FREE = 1 << 29
"""Bytes that weights leave free in host memory: the system kills a process that takes all of it."""
LOCKED_LEFT_FREE = 1 << 32
"""Minimum bytes that page-locked weights leave free, or LOCKED_SHARE of the memory if that is more. ComfyUI leaves as
much."""
LOCKED_SHARE = 0.1


def host_memory() -> tuple[int, int]:
    """Return (free, total) bytes of this machine's memory, or of the container's if that has less. Free memory includes free
    swap on Linux only: other systems do not say how much swap is in use."""
    return min(_memories(swap=True))


def room_for_weights(device: torch.device) -> int:
    """Bytes of host memory that weights of ranks on `device` may still take. Negative if too much is taken already.

    Page-locked memory cannot be swapped out. The system then swaps out everything else, and hangs long before memory and
    swap are full. Memory that other programs have page-locked, also ComfyUI's, is not part of what the system reports as
    available.
    """
    if not page_locked(device):
        return host_memory()[0] - LEFT_FREE
    return min(free - max(LOCKED_LEFT_FREE, int(LOCKED_SHARE * total)) for free, total in _memories(swap=False))


def _memories(swap: bool) -> list[tuple[int, int]]:
    """Return (free, total) bytes of the machine, and of each control group of this process that has a limit."""
    memory = psutil.virtual_memory()
    if sys.platform != "linux":
        return [(memory.available, memory.total)]
    free = memory.available + (psutil.swap_memory().free if swap else 0)
    return [(free, memory.total), *group_limits(MEMBERSHIP.read_text(), CONTROL_GROUPS)]


def group_limits(membership: str, root: Path) -> Iterable[tuple[int, int]]:
    """(free, limit) in bytes of every control group that limits a process's memory. Arguments: see control_groups.groups."""
    for group, second in groups(membership, root, "memory"):
        if second:
            names = "memory.max", "memory.current", "inactive_file"
        else:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        memory = _limit(group, *names)
        if memory is not None:
            yield memory


def _limit(group: Path, limit: str, used: str, cached: str) -> tuple[int, int] | None:
    """Return (free, limit) of one group in bytes. Unused file pages count as free, because the kernel reclaims them."""
    try:
        text = (group / limit).read_text().strip()
        if text == "max" or int(text) > UNLIMITED:
            return None
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = int(text) - int((group / used).read_text()) + int(statistics.get(cached, 0))
    except OSError:  # the group is not visible from here, or has no memory controller
        return None
    return max(0, free), int(text)
