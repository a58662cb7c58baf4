"""Who owns which tokens: pure functions over integers, used alike by the client that cuts and the ranks that compute."""

from dataclasses import dataclass
from itertools import pairwise


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

    def shift(self, by: int) -> "Span":
        return Span(self.start + by, self.stop + by)


def split(span: Span, parts: int) -> tuple[Span, ...]:
    """Cut `span` into `parts` consecutive spans whose lengths differ by at most one (the longer ones first).

    Parts may be empty: a text of 4 tokens over 8 ranks gives four ranks none.
    """
    size, extra = divmod(len(span), parts)
    edges = [span.start]
    for index in range(parts):
        edges.append(edges[-1] + size + (index < extra))
    return tuple(Span(a, b) for a, b in pairwise(edges))


def split_by_cost(costs: list[float], parts: int) -> tuple[Span, ...]:
    """Cut blocks with these costs into `parts` consecutive non-empty spans whose largest sum is as small as possible."""
    count = len(costs)
    assert 1 <= parts <= count
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[p][n]: smallest possible largest sum when the first n blocks make p parts; cut[p][n]: where its last part starts
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for stop in range(part, count + 1):
            for start in range(part - 1, stop):
                worst = max(best[part - 1][start], total[stop] - total[start])
                if worst < best[part][stop]:
                    best[part][stop], cut[part][stop] = worst, start
    spans, stop = [], count
    for part in range(parts, 0, -1):
        spans.append(Span(cut[part][stop], stop))
        stop = cut[part][stop]
    return tuple(reversed(spans))
