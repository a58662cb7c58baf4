"""Named mesh axes over the ranks: which process group, which neighbours, which index this rank has on each axis."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel_backend.core.communicators import grouped_axes, lines_along
from parallel_backend.core.degrees import AXES, Degrees


@dataclass(frozen=True)
class Axis:
    """This rank's view of one mesh axis. `group` is None where the axis has one rank or no collectives."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]  # global ranks along the axis, in order
    group: dist.ProcessGroup | None


def make_axes(degrees: Degrees, rank: int) -> dict[str, Axis]:
    """The mesh's axes by name. Collective over all ranks: builds the groups that this model's collectives need.

    Groups are built by hand, not by a DeviceMesh, since a rank outlives many models: `close_axes` can end these, and
    replicas and stages, which have no collectives, need none.
    """
    at = degrees.coordinate(rank)
    axes = {}
    for name in AXES:
        size, lines = getattr(degrees, name), lines_along(degrees, name)
        own = next(line for line in lines if rank in line)
        group = None
        if name in grouped_axes(degrees):
            group, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines])
        axes[name] = Axis(name, size, getattr(at, name), own, group)
    return axes


def close_axes(axes: dict[str, Axis]) -> None:
    """End the axes' groups, once every rank has done with them. Collective over all ranks."""
    groups = [axis.group for axis in axes.values() if axis.group is not None]
    if groups:
        # NCCL would otherwise guess the device, and open a context on it.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    for group in groups:
        dist.destroy_process_group(group)
