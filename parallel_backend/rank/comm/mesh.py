"""Named mesh axes over the ranks: which process group, which neighbours, which index this rank has on each axis."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel_backend.core.communicators import grouped_axes, lines_along, pipe_links
from parallel_backend.core.degrees import AXES, Degrees


@dataclass(frozen=True)
class Axis:
    """This rank's view of one mesh axis. `group` is None where the axis has one rank or no collectives."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]  # global ranks along the axis, in order
    group: dist.ProcessGroup | None
    far: bool = False
    """Ranks reach each other over a network, by Gloo. The same on all ranks: it decides by which calls they do."""


@dataclass(frozen=True)
class LinkEnd:
    """One end of the way from a stage to the next. `peer`: global rank at the other end. `sends`: this end is the sender.

    `group` has these two ranks and no collectives, so that under NCCL it is one communicator, made at its first transfer.
    """

    peer: int
    sends: bool
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """This rank's place on the mesh of one model. `links`: to the stages beside its own, in the order of pipe_links."""

    axes: dict[str, Axis]
    links: tuple[LinkEnd, ...]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All that the rank is in beside the world's, in the order in which they were made."""
        own = [axis.group for axis in self.axes.values() if axis.group is not None]
        return own + [link.group for link in self.links]

    def link(self, sends: bool) -> LinkEnd | None:
        """The link to the next stage, or from the one before; None at the pipeline's end."""
        return next((link for link in self.links if link.sends == sends), None)


def make_mesh(degrees: Degrees, rank: int, timeout: timedelta, far: bool = False) -> Mesh:
    """The mesh of a model. Collective over all ranks: each makes every group, also those it is not in, in the same order.

    `timeout`: of their transfers; NCCL's own would be 10 minutes. `far`: see Axis. Groups are built by hand, not by a
    DeviceMesh, since a rank outlives many models: `close_mesh` can end these, and replicas, which have no transfers, need
    none.
    """

    def new_group(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        return dist.new_group(list(ranks), timeout=timeout, group_desc=name)

    at = degrees.coordinate(rank)
    axes, grouped = {}, grouped_axes(degrees)
    for name in AXES:
        lines = lines_along(degrees, name)
        own = next(line for line in lines if rank in line)
        groups = {line: new_group(line, name) for line in lines} if name in grouped else {}
        axes[name] = Axis(name, getattr(degrees, name), getattr(at, name), own, groups.get(own), far)
    links = []
    for ends in pipe_links(degrees):
        group = new_group(ends, "link")
        if rank in ends:
            links.append(LinkEnd(ends[rank == ends[0]], rank == ends[0], group))
    return Mesh(axes, tuple(links))


def close_mesh(mesh: Mesh) -> None:
    """End the mesh's groups, once every rank has done with them. Collective over all ranks."""
    if mesh.groups:  # on every rank or on none
        # NCCL would otherwise guess the device, and open a context on it.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    for group in mesh.groups:
        dist.destroy_process_group(group)
