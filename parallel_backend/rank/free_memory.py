"""How much memory a rank can still have: of its GPU, or of the machine and the container that its process is in."""

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from parallel_backend.wire.diagnosis import DeviceMemoryReport

CONTROL_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""What version 1 of control groups writes for no limit is larger."""


def read_memory(
    rank: int, device: torch.device, held: int, others: int = 0, copy_rate: float = 0.0, vae: int = 0
) -> DeviceMemoryReport:
    """`held`: bytes that the rank's model has on a CPU; a CUDA device knows itself what this process holds, which less
    `others`, those of other models, and `vae`, those of parts of VAEs, counts as the model's.
    `copy_rate`: see DeviceMemoryReport.
    """
    node = platform.node()
    if device.type != "cuda":
        free, total = host_memory()
        return DeviceMemoryReport(rank, node, free, held, 0, total)
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    # By the card's own number: two processes may each call another card cuda:0.
    place = f"{node} {getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"
    cached, host_free = torch.cuda.memory_reserved(device) - allocated, host_memory()[0]
    return DeviceMemoryReport(rank, place, free, allocated - others - vae, cached, total, node, host_free, copy_rate, vae)


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
