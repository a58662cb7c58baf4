"""How many bytes of its weights each rank may keep on its device. The other weights are streamed from host memory."""

import math
from collections.abc import Mapping, Sequence

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.setup import Offload

from .model_sizes import RankWeights

GB = 10**9
AUTO, NONE = "auto", "none"
ALL = 1 << 60
"""Stands for bytes of weights on a device without a limit."""


def offload_of(text: str) -> Offload:
    """Return the widget's value: auto, none, or a number of GB to leave free. Raises ValueError for anything else."""
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
    """Divide a device's `budget` bytes among its ranks. Returns the bytes that the weights of each rank may take.

    If the budget is enough for all weights, each rank may keep all of its own. Otherwise each rank gets its minimum, even
    above the budget, and the same fraction of its other weights.
    """
    wanted, least = sum(one.total for one in weights), sum(one.least for one in weights)
    if budget >= wanted or wanted == least:
        return [one.total for one in weights]
    part = max(0, budget - least) / (wanted - least)
    return [one.least + int(part * (one.total - one.least)) for one in weights]


def shared_bytes(degrees: Degrees, sizes: Mapping[int, int]) -> int:
    """Return the bytes of these ranks' weights in one machine's memory. Ranks with the same weights share one copy.

    `sizes`: rank -> bytes of its weights, or of a part of them.
    """
    copies: dict[int, int] = {}
    for rank, size in sizes.items():
        first = degrees.same_weights(rank)[0]
        copies[first] = max(copies.get(first, 0), size)
    return sum(copies.values())
