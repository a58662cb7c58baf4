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
    # traced: python -m benchmarks.sizes.states
    ("flux", 3072): TracedStates(
        tensor=(17.34, 10.34, 7.84, 6.9),
        ulysses=(17.34, 19.34, 19.34, 19.35),
        ring=(17.34, 20.39, 22.39, 22.39),
        patch=(17.34, 17.34, 18.34, 26.35),
        lists=(0.731, 1.0),
    ),
    ("qwen-image", 3072): TracedStates(
        tensor=(14.59, 10.82, 9.88, 9.88),
        ulysses=(14.59, 16.18, 16.18, 18.2),
        ring=(14.59, 19.23, 21.23, 21.24),
        patch=(14.59, 14.59, 17.19, 25.2),
        lists=(1.0,),
    ),
    ("krea2", 6144): TracedStates(
        tensor=(12.48, 8.48, 7.48, 7.48),
        ulysses=(12.48, 14.3, 14.94, 28.5),
        ring=(12.48, 15.34, 16.49, 28.5),
        patch=(12.48, 12.8, 16.46, 25.74),
        lists=(1.0,),
    ),
    ("wan", 5120): TracedStates(
        tensor=(12.14, 12.14, 12.14, 12.14),
        ulysses=(12.14, 14.24, 20.37, 40.67),
        ring=(12.14, 17.26, 21.41, 40.67),
        patch=(12.14, 13.21, 20.37, 40.67),
        lists=(1.0,),
    ),
    ("minimax-h3", 5376): TracedStates(
        tensor=(18.79, 13.46, 10.79, 9.46),
        ulysses=(18.79, 19.6, 19.83, 20.24),
        ring=(18.79, 23.66, 26.56, 26.97),
        patch=(18.79, 18.93, 21.16, 32.23),
        lists=(1.0,),
    ),
    ("ltx-2", 4096): TracedStates(
        tensor=(14.06, 9.19, 7.85, 7.48),
        ulysses=(14.06, 15.15, 15.37, 15.81),
        ring=(14.06, 18.17, 20.37, 20.81),
        patch=(14.06, 14.17, 16.36, 24.73),
        lists=(1.0,),
    ),
    # end of traced
}
"""By family and hidden size. In bf16, text to picture or video; smaller models of a family may have other proportions."""
