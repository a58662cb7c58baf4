"""How much memory this machine has free: of the machine itself, or of the container that this process is in."""

import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""What version 1 of control groups writes for no limit is larger."""
LEFT_FREE = 1 << 29
"""Bytes of the machine's memory, or its container's, that no weights take: who goes to the end is killed by the system."""


def host_memory() -> tuple[int, int]:
    """Bytes of this machine's memory, swap included, that are free for one more process, and of all of it; or of the
    container's, where that has less. On other systems than Linux without swap, which cannot be told from what is in use.
    """
    if sys.platform != "linux":
        memory = psutil.virtual_memory()
        return memory.available, memory.total
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    machine = known["MemAvailable"] + known.get("SwapFree", 0), known["MemTotal"]
    return min([machine, *group_limits(Path("/proc/self/cgroup").read_text(), CONTROL_GROUPS)])


def group_limits(own: str, root: Path) -> Iterable[tuple[int, int]]:
    """(free, limit) in bytes of every control group with a limit on memory that a process is in.

    `own`: what its /proc/self/cgroup says; `root`: where the groups are mounted. A container often sees its own group as
    the root, whatever its name outside.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for count in range(len(parts), -1, -1):
            found = _limit(base.joinpath(*parts[:count]), *names)
            if found is not None:
                yield found


def _limit(group: Path, limit: str, used: str, cached: str) -> tuple[int, int] | None:
    """Of one group. The kernel takes back pages of files that nothing uses, so they count as free."""
    try:
        text = (group / limit).read_text().strip()
        if text == "max" or int(text) > UNLIMITED:
            return None
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = int(text) - int((group / used).read_text()) + int(statistics.get(cached, 0))
    except OSError:  # no such group from here, or no such controller
        return None
    return max(0, free), int(text)
