"""Checks of the machine: driver, libraries, GPUs, the system settings that NCCL needs, and the links between ranks."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from parallel_backend.client.measurements import measured_links
from parallel_backend.client.transports import nccl_version
from parallel_backend.core.cores import usable_cores
from parallel_backend.core.host_memory import host_memory
from parallel_backend.placement.links import SIZES, links_of
from parallel_backend.processes.pool import Pool
from parallel_backend.rank.comm.process_group import backend_for
from parallel_backend.wire.rank_settings import BY_GLOO

from .session import Findings, NotLookedAt, SelfTestSession

LIBRARIES = (
    "torch",
    "diffusers",
    "triton",
    "flash-attn",
    "sageattention",
    "xformers",
    "comfy-kitchen",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
SETTINGS = re.compile(
    r"NCCL_|GLOO_|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_ORDER$|CUDA_MODULE_LOADING$|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF$|"
    r"NVIDIA_TF32_OVERRIDE$|TORCH_ALLOW_TF32|OMP_NUM_THREADS$|TORCH_(NCCL|DISTRIBUTED|DIST|FR)_|HSA_|HIP_VISIBLE_DEVICES$"
)
"""Matches environment variables that change how ranks run."""
SMALL_SHM = 64 << 20
"""Default size in bytes of /dev/shm in a container. NCCL sends through it if there is no P2P."""
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
IOMMU = Path("/sys/class/iommu")
COMMAND_LINE = Path("/proc/cmdline")
SHM = Path("/dev/shm")


def look_at_system(session: SelfTestSession, findings: Findings) -> None:
    """Record facts about the machine. This check cannot fail; the figure `hints` names likely obstacles."""
    count = torch.cuda.device_count()
    facts: dict[str, Any] = {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name)) is not None},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": nccl_version() or None,
        "transport": backend_for(session.settings.devices),
        "driver": _driver(),
        "host": session.host.name,
        "host_options": list(session.host.options),
        "environment": {name: value for name, value in sorted(os.environ.items()) if SETTINGS.match(name)},
        "container": Path("/.dockerenv").exists() or "container" in os.environ,
        "cores": usable_cores(),
        "memory_bytes": host_memory()[1],
        "shm_bytes": shutil.disk_usage(SHM).total if SHM.is_dir() else None,
        "iommu": iommu(),
        "gpus": [_gpu(index) for index in range(count)],
        "peers": peers(count),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }
    for name, value in facts.items():
        findings.note(name, value)
    if not session.settings.on_gpus:
        findings.leave_out("GPUs", "the ranks are on CPUs" if facts["gpus"] else "torch sees none")
    findings.note("hints", hints(facts, len(set(session.settings.devices))))


def hints(facts: dict[str, Any], devices: int) -> list[str]:
    """Return known obstacles for this number of devices, from the facts that look_at_system records."""
    texts = []
    blocked = [pair for pair, reached in facts["peers"].items() if not reached]
    if facts["transport"] == "nccl" and blocked and (facts["shm_bytes"] or SMALL_SHM + 1) <= SMALL_SHM:
        texts.append(
            f"/dev/shm has {facts['shm_bytes'] >> 20} MB, and GPUs without P2P talk through it: give the container more "
            "(docker run --shm-size=8g, or --ipc=host)."
        )
    if devices > 1 and facts["iommu"]["active"] and any(facts["peers"].values()):
        texts.append(
            "P2P is said to be possible and the IOMMU is on: on some boards such transfers hang. If ranks do, set "
            "NCCL_P2P_DISABLE=1, or switch the IOMMU off (BIOS, or iommu=pt on the kernel's command line)."
        )
    if len(facts["gpus"]) > 1 and devices == 1:
        texts.append("There are more GPUs than were looked at: name them in devices.")
    return texts


def iommu() -> dict[str, Any]:
    """Return the number of IOMMU units, the kernel's options for them, and whether they translate devices' addresses."""
    units = len(list(IOMMU.iterdir())) if IOMMU.is_dir() else 0
    kernel_options = COMMAND_LINE.read_text().split() if COMMAND_LINE.is_file() else []
    options = [option for option in kernel_options if "iommu" in option]
    off = {"iommu=off", "iommu=pt", "intel_iommu=off", "amd_iommu=off"}
    return {"units": units, "options": options, "active": units > 0 and not off & set(options)}


def peers(count: int) -> dict[str, bool]:
    """Return '0-1' -> whether device 0 can access device 1's memory directly (P2P), for all pairs of devices."""
    pairs = ((one, two) for one in range(count) for two in range(count) if one != two)
    return {f"{one}-{two}": torch.cuda.can_device_access_peer(one, two) for one, two in pairs}


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(index)),
        "memory_bytes": total,
        "free_bytes": free,
        "processors": properties.multi_processor_count,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the NVIDIA driver's version and kind, without the rest of that line, which says who built it; None if
    unknown."""
    if sys.platform != "linux" or not NVIDIA_VERSION.is_file():
        return None
    line = NVIDIA_VERSION.read_text().partition("\n")[0]
    number = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", line)
    return None if number is None else number[0] + " (open kernel module)" * ("Open Kernel Module" in line)


def look_at_links(session: SelfTestSession, findings: Findings) -> None:
    """Time messages between every two ranks, then between all at once. Planning uses the same measurements."""
    if session.world == 1:
        raise NotLookedAt("there is one rank; name more devices, or one device several times")
    pool = session.ranks()
    for note in pool.notes:  # such as P2P switched off: runs work, but their links are slower than they could be
        findings.wrong.append(note)
    findings.note("links", links(pool, session))
    findings.note("transport", pool.self_test.transport.name if backend_for(pool.devices) == "nccl" else BY_GLOO.name)


def links(pool: Pool, session: SelfTestSession) -> dict[str, Any]:
    """Return '0-1' -> GB/s and microseconds in one direction, and the factor by which links are slower if all ranks send."""
    measured = links_of(measured_links(pool, SIZES, session.poll))
    between = {
        f"{one}-{two}": {"GB_per_s": round(link.bandwidth / 1e9, 3), "us": round(link.latency * 1e6, 1)}
        for (one, two), link in measured.between.items()
    }
    return {"between": between, "crowding": round(measured.crowding, 2)}
