"""The control groups of Linux that limit this process: a container's, and those around it."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""The folder in which groups are mounted. In a container it is often the container's group, even if MEMBERSHIP names another
path."""


def groups(membership: str, root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of each group that contains the process: its own first, then those around it.

    Folders may not exist. `membership`: text of MEMBERSHIP. `root`: as CONTROL_GROUPS. `controller`: such as memory; version
    1 has a hierarchy for each.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for count in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:count]), controllers == ""
