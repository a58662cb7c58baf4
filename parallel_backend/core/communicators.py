"""Groups of ranks that share a communicator: the lines of the mesh along each axis, and the links between pipeline stages.
Ranks create their process groups by these functions (rank/comm/mesh.py)."""

from dataclasses import replace

from .degrees import Coordinate, Degrees

COLLECTIVE_AXES = ("patch", "ring", "ulysses", "tensor")
"""Axes with collective transfers. Replicas exchange nothing, and pipeline stages send from one to the next."""


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
