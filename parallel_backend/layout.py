"""Who owns which tokens: pure functions over integers, used alike by the client that cuts and the ranks that compute."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Span:
    """Half-open range [start, stop) of tokens, rows, blocks or batch entries."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def before(self, end: int) -> "Span":
        """The part of it below `end`."""
        return Span(min(self.start, end), min(self.stop, end))

    def shift(self, by: int) -> "Span":
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter: `spans` along `dim`, put one behind the other. No spans: the rank has none of it."""

    dim: int
    spans: tuple[Span, ...]


def split(span: Span, parts: int) -> tuple[Span, ...]:
    """Cut `span` into `parts` consecutive spans whose lengths differ by at most one (the longer ones first).

    Parts may be empty: a text of 4 tokens over 8 ranks gives four ranks none.
    """
    size, extra = divmod(len(span), parts)
    edges = [span.start]
    for index in range(parts):
        edges.append(edges[-1] + size + (index < extra))
    return tuple(Span(a, b) for a, b in pairwise(edges))


def split_by_share(span: Span, shares: Sequence[float]) -> tuple[Span, ...]:
    """Cut `span` into consecutive spans of about these shares (they sum to 1) of its length."""
    edges, total = [span.start], 0.0
    for share in shares[:-1]:
        total += share
        edges.append(span.start + round(total * len(span)))
    edges.append(span.stop)
    return tuple(Span(a, b) for a, b in pairwise(edges))


@dataclass(frozen=True)
class SequenceCut:
    """How a stage's text and image tokens are cut over its sequence ranks (patch x ring x ulysses, outer to inner).

    `shares`: of each patch rank, which is how a slower device gets a smaller band. `inner`: ring x ulysses. In naive
    patch mode (`repeat_text`) every band has the whole text, since there is no other way for it to know the prompt.
    """

    shares: tuple[float, ...]
    inner: int
    repeat_text: bool

    def image(self, tokens: Span) -> tuple[Span, ...]:
        """By sequence rank."""
        return tuple(part for band in split_by_share(tokens, self.shares) for part in split(band, self.inner))

    def text(self, tokens: int) -> tuple[Span, ...]:
        """By sequence rank, of `tokens` text tokens."""
        span = Span(0, tokens)
        bands = (span,) * len(self.shares) if self.repeat_text else split_by_share(span, self.shares)
        return tuple(part for band in bands for part in split(band, self.inner))


def cut_blocks(
    costs: Sequence[Sequence[float]], sizes: Sequence[int], capacities: Sequence[int | None]
) -> tuple[Span, ...] | None:
    """Cut the blocks into consecutive non-empty spans, one per stage, so that the slowest stage is as fast as possible.

    `costs[stage][block]`: seconds of the block on that stage's device. A stage's blocks, of these `sizes` in bytes, must
    fit its capacity (None: no limit). None where no cut fits.
    """
    stages, count = len(costs), len(sizes)
    assert 1 <= stages <= count
    total = [[0.0, *accumulate(stage)] for stage in costs]
    held = [0, *accumulate(sizes)]
    # best[s][n]: smallest possible slowest stage when the first s stages have n blocks; cut[s][n]: where its last starts
    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage, capacity in enumerate(capacities):
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                if capacity is not None and held[stop] - held[start] > capacity:
                    continue
                worst = max(best[stage][start], total[stage][stop] - total[stage][start])
                if worst < best[stage + 1][stop]:
                    best[stage + 1][stop], cut[stage + 1][stop] = worst, start
    if best[stages][count] == math.inf:
        return None
    spans, stop = [], count
    for stage in range(stages, 0, -1):
        spans.append(Span(cut[stage][stop], stop))
        stop = cut[stage][stop]
    return tuple(reversed(spans))
