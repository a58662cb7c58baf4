"""Number of CPU cores that this process may use: the machine's, or its share of them, as in a container."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .control_groups import CONTROL_GROUPS, MEMBERSHIP, groups


def usable_cores() -> int:
    """Return the number of usable cores, at least 1. On Linux at most as many as taskset, a container's core set or its CPU
    quota allow. More threads would stop each other: all of them are halted once a quota is used up."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quotas = quotas_of(MEMBERSHIP.read_text(), CONTROL_GROUPS) if MEMBERSHIP.is_file() else ()
    return max(1, int(min([allowed, *quotas])))


def quotas_of(membership: str, root: Path) -> Iterator[float]:
    """CPU time in cores, for every group with a limit. Arguments: see control_groups.groups."""
    for group, second in groups(membership, root, "cpu"):
        names = ("cpu.max",) if second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except OSError:  # the group is not visible from here, or has no such controller
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)
