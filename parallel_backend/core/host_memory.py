"""Free memory of this machine, or of the container in which this process runs."""

import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number above this for no limit."""
LEFT_FREE = 1 << 29
"""Bytes that weights leave free in host memory: the system kills a process that takes all of it."""


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of this machine's memory, or of the container's if that has less. Free memory includes swap on
    Linux; other systems do not say how much of it is in use.
    """
    if sys.platform != "linux":
        memory = psutil.virtual_memory()
        return memory.available, memory.total
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    machine = known["MemAvailable"] + known.get("SwapFree", 0), known["MemTotal"]
    return min([machine, *group_limits(Path("/proc/self/cgroup").read_text(), CONTROL_GROUPS)])


def group_limits(membership: str, root: Path) -> Iterable[tuple[int, int]]:
    """(free, limit) in bytes of every control group that limits a process's memory.

    `membership`: text of the process's /proc/self/cgroup. `root`: where the groups are mounted. In a container `root` is
    often the container's group, whatever path the text names.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for count in range(len(parts), -1, -1):
            memory = _limit(base.joinpath(*parts[:count]), *names)
            if memory is not None:
                yield memory


def _limit(group: Path, limit: str, used: str, cached: str) -> tuple[int, int] | None:
    """(free, limit) of one group. Unused file pages count as free, since the kernel reclaims them."""
    try:
        text = (group / limit).read_text().strip()
        if text == "max" or int(text) > UNLIMITED:
            return None
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = int(text) - int((group / used).read_text()) + int(statistics.get(cached, 0))
    except OSError:  # the group is not visible from here, or has no memory controller
        return None
    return max(0, free), int(text)
