"""Which ranks speak to each other over a communicator of their own, as data: a mesh's lines, its pipeline's links, and how
many communicators that makes on a rank.

The ranks make their process groups from it (rank/comm/mesh.py), the memory model counts what they take.
"""

from dataclasses import replace

from .degrees import Coordinate, Degrees

COLLECTIVE_AXES = ("patch", "ring", "ulysses", "tensor")
"""Axes whose ranks take part in common transfers. Replicas have none, and stages hand on from one to the next."""


def grouped_axes(degrees: Degrees) -> tuple[str, ...]:
    """The axes that need a communicator for each of their lines. Naive patches never hear of each other."""
    return tuple(name for name in COLLECTIVE_AXES if getattr(degrees, name) > 1 and not (name == "patch" and degrees.naive))


def lines_along(degrees: Degrees, name: str) -> list[tuple[int, ...]]:
    """All ranks, in lines along one axis."""
    lines: dict[Coordinate, list[int]] = {}
    for rank in range(degrees.world):
        lines.setdefault(replace(degrees.coordinate(rank), **{name: 0}), []).append(rank)
    return [tuple(line) for line in lines.values()]


def pipe_links(degrees: Degrees) -> list[tuple[int, int]]:
    """(sender, receiver) of every two stages that follow each other: first from each even stage, then from each odd one.

    So links of one half come up side by side, and every rank meets its own in the order of this list.
    """
    lines = lines_along(degrees, "pipe")
    senders = sorted(range(degrees.pipe - 1), key=lambda stage: stage % 2)
    return [(line[stage], line[stage + 1]) for stage in senders for line in lines]


def receives_early(degrees: Degrees) -> bool:
    """Whether a stage may receive for the next micro-step while it computes this one: only where it has no collectives.

    Which receives are posted early depends on when messages arrive, so that it differs from rank to rank. Links alone form
    a path of stages, each in micro-step order: however a rank interleaves its two, no circle of waits can come of it. A
    collective ties the paths of several ranks together, and torch wants all ranks to use their groups in one order.
    """
    return not grouped_axes(degrees)


def communicators(degrees: Degrees, rank: int) -> int:
    """How many `rank` has while a model of these degrees is loaded: the world's, its axes', and its links'.

    None where it is alone. Under NCCL each takes memory on the rank's device; under Gloo none of that.
    """
    if degrees.world == 1:
        return 0
    return 1 + len(grouped_axes(degrees)) + sum(rank in link for link in pipe_links(degrees))
