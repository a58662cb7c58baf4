"""Binds a rank to the CPU cores nearest to its GPU, on a machine with several NUMA nodes. Memory that the rank takes later,
such as page-locked weights, is then also near the GPU. Linux only."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from parallel_backend.core.devices import device_kind, in_its_process, on_ray

log = logging.getLogger(__name__)

SYSTEM = Path("/sys")
NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Folder with a subfolder for each GPU, named by its PCI address."""
NO_NODE = -1
"""The system's value for a device that is not near any node."""


def bind_to_gpu(device: str, devices: Sequence[str], threads: int) -> int:
    """Bind this thread, and threads that it starts, to the cores of the GPU's node. Returns the rank's number of CPU
    threads.

    Does nothing with a single node, or if the user has restricted this process to some of those cores. `device`: the rank's,
    by torch's name. `devices`: of all ranks. `threads`: number of threads if the rank is not bound.
    """
    nodes = list((SYSTEM / "devices/system/node").glob("node*"))
    if sys.platform != "linux" or device_kind(device) != "cuda" or len(nodes) < 2:
        return threads
    node = node_of(device)
    cores = cores_of(node)
    allowed = os.sched_getaffinity(0)
    if not cores or not cores < allowed:
        return threads
    os.sched_setaffinity(0, cores)
    log.info("on the %d CPU cores of NUMA node %d, which is that of %s", len(cores), node, device)
    local = [in_its_process(name) for name in devices if device_kind(name) == "cuda" and not on_ray(name)]
    beside = max(1, sum(node_of(name) == node for name in local))
    return max(1, min(threads, len(cores) // beside))


def node_of(device: str) -> int:
    """Return the NUMA node of a GPU. NO_NODE if there is none or it is unknown."""
    try:
        return int((SYSTEM / "bus/pci/devices" / bus_place(device) / "numa_node").read_text())
    except (OSError, ValueError):
        return NO_NODE


def cores_of(node: int) -> set[int]:
    """Return the numbers of a node's CPU cores. Empty if they are unknown."""
    try:
        text = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return set()
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def bus_place(device: str) -> str:
    """Return the GPU's PCI address, such as 0000:65:00.0. Raises OSError if it is unknown. Creates no context on the GPU."""
    found: Any = torch.cuda.get_device_properties(device)
    if hasattr(found, "pci_bus_id"):  # torch newer than 2.9
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    uuid = str(getattr(found, "uuid", ""))
    for folder in NVIDIA.iterdir():
        if uuid and uuid in (folder / "information").read_text():
            return folder.name
    raise OSError(f"no GPU {uuid} in {NVIDIA}")
