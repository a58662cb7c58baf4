"""How many bytes of its weights each rank may keep on its device. The others are in host memory and streamed from there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees

from .model_sizes import RankWeights

GB = 10**9
AUTO, NONE = "auto", "none"
ALL = 1 << 60
"""Bytes of weights on a device without a limit."""


@dataclass(frozen=True)
class Offload:
    """What the widget `offload` allows."""

    streams: bool = True
    """Weights that do not fit on a device are streamed from host memory, rather than refused."""
    leave_free: int = 0
    """Bytes of each device that weights and runs are not to take, as far as streaming helps."""


ALLOWED = Offload()
"""As the widget's `auto` has it."""


def offload_of(text: str) -> Offload:
    """The widget's text: auto, none, or a number of GB to leave free. ValueError for anything else."""
    word = text.strip().lower()
    if word in (AUTO, NONE):
        return Offload(streams=word == AUTO)
    try:
        size = float(word.removesuffix("gb"))
    except ValueError:
        size = -1.0
    if not 0 <= size < math.inf:
        raise ValueError(
            f"offload is '{text[:60]}': use auto, none, or a number of GB to leave free on each GPU, such as 4."
        )
    return Offload(leave_free=round(size * GB))


def share_out(weights: Sequence[RankWeights], budget: int) -> list[int]:
    """What each of the ranks that share `budget` bytes of a device gets of it: all that it has, if that is enough for all.

    Otherwise each has its least, whatever the budget, and the same part of the rest as the others.
    """
    wanted, least = sum(one.total for one in weights), sum(one.least for one in weights)
    if budget >= wanted or wanted == least:
        return [one.total for one in weights]
    part = max(0, budget - least) / (wanted - least)
    return [one.least + int(part * (one.total - one.least)) for one in weights]


def shared_bytes(degrees: Degrees, sizes: Mapping[int, int]) -> int:
    """Bytes of these ranks' weights in one machine's memory: those that have the same weights share one copy there.

    `sizes`: rank -> bytes of its weights, or of a part of them.
    """
    copies: dict[int, int] = {}
    for rank, size in sizes.items():
        first = degrees.same_weights(rank)[0]
        copies[first] = max(copies.get(first, 0), size)
    return sum(copies.values())
