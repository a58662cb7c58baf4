"""Named mesh axes over the ranks: which process group, which neighbours, which index this rank has on each axis."""

import contextlib
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .config import AXES, Degrees

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
"""Interface name by `sys.platform`; Gloo would otherwise listen on the address that the host name resolves to."""


@dataclass(frozen=True)
class Axis:
    """This rank's view of one mesh axis. `group` is None where the axis has one rank."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]  # global ranks along the axis, in order
    group: dist.ProcessGroup | None


def backend_for(devices: tuple[str, ...]) -> str:
    """NCCL when every rank has a CUDA device of its own and NCCL is built in; Gloo otherwise (CPU, shared GPUs, Windows)."""
    distinct = len(set(devices)) == len(devices) and all(name.startswith("cuda") for name in devices)
    return "nccl" if distinct and dist.is_nccl_available() else "gloo"


def join(rank: int, devices: tuple[str, ...], rendezvous: Path, timeout: timedelta) -> None:
    """Join the process group of all ranks through a store file in a directory that only this user can read."""
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    dist.init_process_group(
        backend_for(devices),
        store=dist.FileStore(str(rendezvous), len(devices)),
        rank=rank,
        world_size=len(devices),
        timeout=timeout,
    )


def leave() -> None:
    """Destroy the process group. A peer that is already gone makes this fail, and then there is nothing left to leave."""
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def make_axes(degrees: Degrees, rank: int, device: torch.device) -> dict[str, Axis]:
    """The mesh's axes by name. Collective over all ranks: builds a group for each axis with more than one rank."""
    at = degrees.coordinate(rank)
    device_mesh = init_device_mesh(device.type, degrees.sizes, mesh_dim_names=AXES) if degrees.world > 1 else None
    axes = {}
    for name in AXES:
        size = getattr(degrees, name)
        position = {axis: getattr(at, axis) for axis in AXES}
        ranks = tuple(degrees.rank(**(position | {name: index})) for index in range(size))
        group = device_mesh.get_group(name) if size > 1 else None
        axes[name] = Axis(name, size, getattr(at, name), ranks, group)
    return axes
