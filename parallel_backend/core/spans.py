"""Spans of tokens, rows, blocks or batch entries, and the functions by which client and ranks split them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """Half-open range [start, stop) of tokens, rows, blocks or batch entries. Raises ValueError if it ends before it
    starts."""

    start: int
    stop: int

    def __post_init__(self):
        if self.stop < self.start:
            raise ValueError(f"{self} ends before it starts")

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def before(self, end: int) -> "Span":
        """Return the part of the span below `end`."""
        return Span(min(self.start, end), min(self.stop, end))

    def after(self, start: int) -> "Span":
        """Return the part of the span from `start` on, counted from `start`."""
        return Span(max(self.start, start), max(self.stop, start)).shift(-start)

    def common(self, other: "Span") -> "Span":
        """Return the part that both spans have. Empty if there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> "Span":
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter: `spans` along `dim`, concatenated. No spans: the rank has no part."""

    dim: int
    spans: tuple[Span, ...]


def split(span: Span, parts: int) -> tuple[Span, ...]:
    """Split `span` into `parts` consecutive spans, longer ones first. Lengths differ by at most one, and may be 0."""
    size, extra = divmod(len(span), parts)
    edges = [span.start]
    for index in range(parts):
        edges.append(edges[-1] + size + (index < extra))
    return tuple(Span(a, b) for a, b in pairwise(edges))


def split_units(span: Span, parts: int, units: int) -> tuple[Span, ...]:
    """Like `split`, but no cut divides one of this number of equal units."""
    size, rest = divmod(len(span), units)
    assert not rest, f"{len(span)} has no {units} equal units"
    return tuple(Span(each.start * size, each.stop * size).shift(span.start) for each in split(Span(0, units), parts))


def split_carrying(span: Span, parts: int, carried: float) -> tuple[Span, ...]:
    """Like `split`, but the first part also carries the load `carried`. Returns the split with the smallest largest load.

    Ties go to the split whose loads differ least, then to the one with the shortest first part. The first part is at least
    half as long as in `split`.
    """
    if parts == 1 or not carried:
        return split(span, parts)
    even = len(span) / parts

    def unevenness(first: int) -> tuple[float, float, int]:
        others = len(span) - first
        loads = (first + carried, others // (parts - 1), -(-others // (parts - 1)))
        return max(loads), max(loads) - min(loads), first

    first = min(range(math.ceil(even / 2), math.ceil(even) + 1), key=unevenness)
    return Span(span.start, span.start + first), *split(Span(span.start + first, span.stop), parts - 1)


def split_by_share(span: Span, shares: Sequence[float]) -> tuple[Span, ...]:
    """Split `span` into consecutive spans whose lengths are `shares` of its length, rounded. `shares` sum to 1."""
    edges, total = [span.start], 0.0
    for share in shares[:-1]:
        total += share
        edges.append(span.start + round(total * len(span)))
    edges.append(span.stop)
    return tuple(Span(a, b) for a, b in pairwise(edges))


def in_proportion(sizes: Sequence[int], length: int) -> tuple[Span, ...]:
    """Split `length` into consecutive spans in the proportion of `sizes`, which must divide it without remainder."""
    total, edges = sum(sizes), [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    assert all(edge * length % total == 0 for edge in edges), f"{length} cannot be cut as {sizes}"
    return tuple(Span(a * length // total, b * length // total) for a, b in pairwise(edges))
