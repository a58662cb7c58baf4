"""Named mesh axes over the ranks: this rank's process group, neighbours and index on each axis. Ranks along an axis, and the
two ends of a link between pipeline stages, share a communicator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel_backend.core.degrees import AXES, Coordinate, Degrees

COLLECTIVE_AXES = ("patch", "ring", "ulysses", "tensor")
"""Axes with collective transfers. Replicas exchange nothing, and pipeline stages send from one to the next."""


@dataclass(frozen=True)
class Axis:
    """This rank's view of one mesh axis. `group` is None if the axis has one rank or no collectives."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]  # global ranks along the axis, in order
    group: dist.ProcessGroup | None
    far: bool = False
    """Whether ranks are connected by Gloo over a network. Equal on all ranks, because it decides which calls they make."""

    @property
    def joined(self) -> dist.ProcessGroup:
        """The `group` of an axis that has one."""
        assert self.group is not None
        return self.group


@dataclass(frozen=True)
class LinkEnd:
    """One end of the link from a stage to the next. `peer`: global rank at the other end. `sends`: this end is the sender.
    `group` has only these two ranks and no collectives. Under NCCL it is one communicator, created at its first transfer."""

    peer: int
    sends: bool
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """This rank's position on the mesh of one model. `links`: to the neighbouring stages, in the order of pipe_links."""

    axes: dict[str, Axis]
    links: tuple[LinkEnd, ...]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups of the rank except the world's, in order of creation."""
        of_axes = [axis.group for axis in self.axes.values() if axis.group is not None]
        return of_axes + [link.group for link in self.links]

    def link(self, sends: bool) -> LinkEnd | None:
        """Return the link to the next stage if `sends`, otherwise from the previous stage. None at the pipeline's ends."""
        return next((link for link in self.links if link.sends == sends), None)


def grouped_axes(degrees: Degrees) -> tuple[str, ...]:
    """Return the axes that need a communicator for each of their lines. Naive patches exchange nothing."""
    return tuple(name for name in COLLECTIVE_AXES if getattr(degrees, name) > 1 and not (name == "patch" and degrees.naive))


def lines_along(degrees: Degrees, name: str) -> list[tuple[int, ...]]:
    """Return all ranks, grouped into lines along the axis `name`."""
    lines: dict[Coordinate, list[int]] = {}
    for rank in range(degrees.world):
        lines.setdefault(replace(degrees.coordinate(rank), **{name: 0}), []).append(rank)
    return [tuple(line) for line in lines.values()]


def pipe_links(degrees: Degrees) -> list[tuple[int, int]]:
    """Return (sender, receiver) of every pair of successive stages: first from the even stages, then from the odd ones.
    Every rank sets up its links in the order of this list. In this order the links of each half are set up in parallel."""
    lines = lines_along(degrees, "pipe")
    senders = sorted(range(degrees.pipe - 1), key=lambda stage: stage % 2)
    return [(line[stage], line[stage + 1]) for stage in senders for line in lines]


def receives_early(degrees: Degrees) -> bool:
    """Whether a stage may receive for the next micro-step during the present one: only if it has no collectives.

    The time at which a receive is posted depends on the arrival of messages, so it differs between ranks. Point-to-point
    links form a path of stages, each in micro-step order, so no interleaving of them deadlocks. A collective joins the paths
    of several ranks, and torch requires all ranks to use their groups in the same order.
    """
    return not grouped_axes(degrees)


def make_mesh(
    degrees: Degrees, rank: int | None, timeout: timedelta, far: bool = False, ranks: tuple[int, ...] | None = None
) -> Mesh:
    """Return the mesh of a model. Collective over all ranks of the pool.

    `ranks`: the pool's ranks that have the model, ascending; None: all. `rank`: this rank's number among them; None: it has
    no part of the model, and gets an empty mesh. `timeout`: for the groups' transfers; NCCL's default would be 10 minutes.
    `far`: see Axis.
    """
    ranks = tuple(range(degrees.world)) if ranks is None else ranks
    # Groups are made by hand and not by a DeviceMesh. A rank outlives many models, so `close_mesh` has to end the groups,
    # and replicas have no transfers and need none.

    # torch requires every rank to call new_group for every group, in the same order, also for groups that it is not in.
    def of_pool(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(ranks[number] for number in numbers)

    def new_group(numbers: tuple[int, ...], name: str) -> dist.ProcessGroup:
        return dist.new_group(list(of_pool(numbers)), timeout=timeout, group_desc=name)

    lines = {name: lines_along(degrees, name) for name in AXES}
    groups = {name: {line: new_group(line, name) for line in lines[name]} for name in AXES if name in grouped_axes(degrees)}
    ends_of_links = {ends: new_group(ends, "link") for ends in pipe_links(degrees)}
    if rank is None:
        return Mesh({}, ())
    axes, coordinate = {}, degrees.coordinate(rank)
    for name in AXES:
        line = next(line for line in lines[name] if rank in line)
        group = groups.get(name, {}).get(line)
        axes[name] = Axis(name, getattr(degrees, name), getattr(coordinate, name), of_pool(line), group, far)
    links = [
        LinkEnd(of_pool(ends)[rank == ends[0]], rank == ends[0], group)
        for ends, group in ends_of_links.items()
        if rank in ends
    ]
    return Mesh(axes, tuple(links))


def close_mesh(mesh: Mesh, meet: Callable[[], None] | None = None) -> None:
    """Destroy the mesh's groups once every rank has stopped using them. Collective over the mesh's ranks.

    `meet`: waits for all of the mesh's ranks if they are only a part of the pool, because a part has no communicator. None:
    the mesh has the whole pool.
    """
    if mesh.groups and meet is not None:  # on every rank or on none
        if dist.get_backend() == "nccl":  # transfers are over on the device, too
            torch.cuda.synchronize()
        meet()
    elif mesh.groups:
        # NCCL would otherwise guess the device, and open a context on it.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    for group in mesh.groups:
        dist.destroy_process_group(group)
