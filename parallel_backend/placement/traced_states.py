"""Memory at the peak of a run, of models whose ranks were traced with real sizes (benchmarks/sizes), in hidden states."""

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
    picture grows with them. `lists`: of a stage without blocks behind this block list, over that of a stage with blocks of the last.
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
    # traced: python -m benchmarks.sizes.states
    # end of traced
}
"""By family and hidden size. In bf16, text to picture or video; smaller models of a family may have other proportions."""
