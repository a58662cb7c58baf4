"""The order of a request's image tokens: the picture's own, and those of reference pictures (Flux Kontext, Qwen-Image-Edit).

Reference tokens go through the blocks like the picture's; only their output is of no use. Every token row of the picture
is followed by its share of them, so that bands are of equal length: all of them in one band would make that one several
times as long as the others.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import torch

from .spans import Span, split


@dataclass(frozen=True)
class TokenOrder:
    """`image`: tokens of the picture, in rows of `row`; `references`: tokens of all reference pictures together."""

    image: int
    row: int
    references: int = 0

    @property
    def tokens(self) -> int:
        return self.image + self.references

    @property
    def span(self) -> Span:
        return Span(0, self.tokens)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each row starts, and the end."""
        rows = self.image // self.row
        shares = split(Span(0, self.references), rows)
        return [index * self.row + share.start for index, share in enumerate(shares)] + [self.tokens]

    def of_rows(self, rows: Span) -> Span:
        """The tokens of these token rows, and the reference tokens that go with them."""
        return Span(self._starts[rows.start], self._starts[rows.stop])

    def images(self, span: Span) -> Span:
        """Which of the picture's tokens are in `span`, counted among themselves."""
        return Span(self._images_before(span.start), self._images_before(span.stop))

    def _images_before(self, place: int) -> int:
        if place == self.tokens:
            return self.image
        row = bisect_right(self._starts, place) - 1
        return row * self.row + min(place - self._starts[row], self.row)

    def places(self, span: Span) -> torch.Tensor:
        """[n] of `span`: a picture's token's number among those, or `image` + a reference token's number among those."""
        index = torch.arange(span.start, span.stop)
        starts = torch.tensor(self._starts[:-1])
        row = torch.searchsorted(starts, index, right=True) - 1
        inside = index - starts[row]
        return torch.where(inside < self.row, row * self.row + inside, self.image + index - (row + 1) * self.row)
