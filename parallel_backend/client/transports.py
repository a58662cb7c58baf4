"""Stores how ranks on GPUs transfer, if NCCL's own choice is not the best one.

Between some GPUs direct access (P2P) hangs, and the self-test of the links needs a minute to notice. A stored result avoids
that minute at later starts of ComfyUI. Between others P2P is faster than NCCL's own choice: Parallel Self-Test measures it.
"""

import hashlib
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.kept_file import find_kept, keep, kept_path
from parallel_backend.wire.rank_settings import BY_NCCL, P2P_VARIABLES, TRANSPORTS, Transport

log = logging.getLogger(__name__)

NAME = "transport"
MACHINE = tuple(map(Path, ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/proc/cmdline")))
"""Files with the drivers' versions and the kernel's options, such as for the IOMMU."""
IOMMU = Path("/sys/class/iommu")
"""Folder with an entry for each active IOMMU."""


class KeptTransports:
    """Not thread-safe. `folder`: returns the folder of the files. None: choices last as long as the process."""

    def __init__(self, folder: Callable[[], Path | None]):
        self._folder = folder
        self._here: dict[tuple[str, ...], Transport] = {}

    def of(self, devices: tuple[str, ...]) -> Transport:
        """Return how ranks on these devices should transfer, as found by this process or an earlier one with the same GPUs
        and driver."""
        if devices in self._here:
            return self._here[devices]
        folder = self._folder_for(devices)
        if folder is None or not any(folder.glob(f"{NAME}-*")):
            return BY_NCCL
        key = _key(devices)
        transport = find_kept(folder, key, NAME, TRANSPORTS.__getitem__) or BY_NCCL
        if transport != BY_NCCL:
            told = "Parallel DiT: %s between %s, as an earlier start found out. To begin again, delete %s"
            log.info(told, transport.name, ", ".join(devices), kept_path(folder, key, NAME))
        return transport

    def turn_to(self, devices: tuple[str, ...], transport: Transport) -> None:
        """Use this transport for now. It is unknown yet whether it works."""
        self._here[devices] = transport

    def keep(self, devices: tuple[str, ...], transport: Transport) -> None:
        """Store that these devices work by this transport. Later starts use it until driver, GPUs, torch, NCCL or the IOMMU
        change."""
        self._here[devices] = transport
        if (folder := self._folder_for(devices)) is not None:
            keep(folder, _key(devices), NAME, transport.name)

    def forget(self, devices: tuple[str, ...]) -> None:
        """Have NCCL decide again on these devices."""
        self._here.pop(devices, None)
        folder = self._folder_for(devices)
        if folder is not None and kept_path(folder, key := _key(devices), NAME).exists():
            keep(folder, key, NAME, BY_NCCL.name)

    def _folder_for(self, devices: tuple[str, ...]) -> Path | None:
        """Return the folder to use for these devices. None: nothing is stored for CPUs and for GPUs of a Ray cluster, which
        may differ next time."""
        return self._folder() if all(device_kind(name) == "cuda" and not on_ray(name) for name in devices) else None


def _key(devices: tuple[str, ...]) -> dict[str, object]:
    """`cards`: sorted UUIDs of these GPUs. `machine`: a digest of other facts that decide how they can transfer. Only
    queries the GPUs' properties, which creates no context on a GPU."""
    properties = [torch.cuda.get_device_properties(name) for name in devices]
    cards = sorted(str(getattr(one, "uuid", one.name)) for one in properties)
    facts = [torch.__version__, platform.release(), *(path.read_text() for path in MACHINE if path.is_file())]
    facts += [str(len(list(IOMMU.iterdir())) if IOMMU.is_dir() else 0), nccl_version()]
    facts += [os.environ.get(name, "") for name in P2P_VARIABLES]
    return {"cards": cards, "machine": hashlib.sha256("\n".join(facts).encode()).hexdigest()}


def nccl_version() -> str:
    """Return the version of the NCCL that torch has loaded, which may be newer than torch's own. Empty without NCCL."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ""
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
