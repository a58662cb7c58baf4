"""Memory at the peak of a run, of models whose ranks were traced with real sizes (benchmarks/sizes), in hidden states."""

import functools
import statistics
from dataclasses import dataclass

from parallel_backend.core.degrees import Degrees

RANKS = (1, 2, 4, 8)
"""Ranks of an axis that were traced."""
ByRanks = tuple[float, float, float, float]
"""For each of RANKS on one axis."""


@dataclass(frozen=True)
class TracedStates:
    """Bytes at a run's peak beside weights and kept keys and values, over the bytes of a hidden state of the rank's tokens.

    `tensor`, `ulysses`, `ring`, `patch`: with ranks on one axis, the others 1. What every rank computes for the whole
    picture grows with them. `lists`: of a stage whose last block is of this block list, over that of a stage whose last
    block is of the last one.
    """

    tensor: ByRanks
    ulysses: ByRanks
    ring: ByRanks
    patch: ByRanks
    lists: tuple[float, ...] = (1.0,)

    def at(self, degrees: Degrees, last_list: int) -> float:
        """With these degrees, on a stage whose last block is of the list `last_list`. An estimate for products of axes."""
        axes = ((self.ulysses, degrees.ulysses), (self.ring, degrees.ring), (self.patch, degrees.patch))
        further = sum(max(0.0, _between(traced, ranks) - traced[0]) for traced, ranks in axes)
        return (_between(self.tensor, degrees.tensor) + further) * self.lists[last_list]


def _between(traced: ByRanks, ranks: int) -> float:
    """For any number of ranks. A part that all of the axis share falls with 1 / ranks, so that is what is linear between."""
    for (fewer, before), (more, after) in zip(
        zip(RANKS, traced, strict=True), zip(RANKS[1:], traced[1:], strict=True), strict=False
    ):
        if ranks <= more:
            share = (1 / fewer - 1 / ranks) / (1 / fewer - 1 / more)
            return before + share * (after - before)
    # What grows for the whole picture's sake grows as the ranks do.
    return traced[-1] * max(1.0, ranks / RANKS[-1] if traced[-1] > traced[-2] else 1.0)


TRACED: dict[tuple[str, int], TracedStates] = {
    # Of families that computed what ComfyUI's own class does, which takes as much on one rank (docs/results/real_sizes.md).
    ("MiniMaxH3Model", 5376): TracedStates(
        tensor=(15.79, 10.46, 7.79, 6.92),
        ulysses=(15.79, 17.6, 17.83, 18.24),
        ring=(15.79, 21.66, 24.56, 24.97),
        patch=(15.79, 15.93, 19.16, 30.23),
        lists=(1.0,),
    ),
    ("WanModel", 5120): TracedStates(
        tensor=(9.54, 7.65, 5.89, 5.48),
        ulysses=(9.54, 14.21, 16.36, 20.66),
        ring=(9.54, 17.26, 21.41, 25.71),
        patch=(9.54, 11.21, 17.36, 29.66),
        lists=(1.0,),
    ),
    ("WanModel", 3072): TracedStates(
        tensor=(13.67, 9.0, 6.67, 5.92),
        ulysses=(13.67, 14.86, 17.24, 22.0),
        ring=(13.67, 17.57, 21.95, 26.71),
        patch=(13.67, 14.86, 17.91, 30.67),
        lists=(1.0,),
    ),
    # The most of three: without a given picture, with one and with three (real_sizes.WITH_REFERENCES).
    ("qwen-image-2.1", 4096): TracedStates(
        tensor=(14.66, 10.16, 7.91, 7.66),
        ulysses=(14.66, 16.2, 19.26, 25.4),
        ring=(14.66, 17.96, 19.81, 31.97),
        patch=(14.66, 12.48, 13.25, 20.53),
    ),
}
"""By family, or name of ComfyUI's own class, and hidden size. In bf16, text to picture or video; smaller models may
have other proportions."""


@functools.cache
def typical(one_rank: float) -> TracedStates:
    """Of a model that was not traced: `one_rank` hidden states on one rank, and on more as many times that as the median of
    the traced models has."""

    def along(axis: str) -> ByRanks:
        traced = [getattr(states, axis) for states in TRACED.values()]
        first, second, third, last = (
            one_rank * statistics.median(each[place] / each[0] for each in traced) for place in range(len(RANKS))
        )
        return first, second, third, last

    return TracedStates(along("tensor"), along("ulysses"), along("ring"), along("patch"))
