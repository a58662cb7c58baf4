"""The order of a request's image tokens: the picture's own, and those of reference pictures (Flux Kontext, Qwen-Image-Edit).

Reference tokens go through the blocks like the picture's, but their output is dropped. Every token row of the picture is
followed by an equal share of them, so bands have equal lengths. All of them in one band would make that band several times
as long as the others.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import torch

from .spans import Span, split


def class_order(grid: tuple[int, ...], along: str) -> torch.Tensor | None:
    """[N]: place in our order -> place in diffusers' classes' order: frames, rows, columns. None if they are the same.

    `grid`: (frames,) rows, columns. `along`: see TokenOrder.
    """
    if len(grid) == 2 or along == "frames" or grid[0] == 1:
        return None
    return torch.arange(torch.Size(grid).numel()).view(grid).transpose(0, 1).flatten()


@dataclass(frozen=True)
class TokenOrder:
    """Places 0 to `tokens` - 1 of a request's image tokens."""

    image: int
    """Tokens of the picture."""
    row: int
    """Tokens of one row of the picture; of one frame, along frames."""
    references: int = 0
    """Tokens of all reference pictures together."""
    along: str = "rows"
    """Patching.along: which axis of the picture the order goes by first."""

    @property
    def tokens(self) -> int:
        return self.image + self.references

    @property
    def span(self) -> Span:
        return Span(0, self.tokens)

    @cached_property
    def _starts(self) -> list[int]:
        """Place of each row's first token, and `tokens`."""
        rows = self.image // self.row
        shares = split(Span(0, self.references), rows)
        return [index * self.row + share.start for index, share in enumerate(shares)] + [self.tokens]

    def of_rows(self, rows: Span) -> Span:
        """Places of these token rows, with the reference tokens behind each row."""
        return Span(self._starts[rows.start], self._starts[rows.stop])

    def images(self, span: Span) -> Span:
        """The picture's tokens in `span`, numbered without reference tokens."""
        return Span(self._images_before(span.start), self._images_before(span.stop))

    def _images_before(self, place: int) -> int:
        if place == self.tokens:
            return self.image
        row = bisect_right(self._starts, place) - 1
        return row * self.row + min(place - self._starts[row], self.row)

    def places(self, span: Span) -> torch.Tensor:
        """[n] int64, by place of `span`: number of the picture's token, or `image` + number of the reference token."""
        index = torch.arange(span.start, span.stop)
        starts = torch.tensor(self._starts[:-1])
        row = torch.searchsorted(starts, index, right=True) - 1
        inside = index - starts[row]
        return torch.where(inside < self.row, row * self.row + inside, self.image + index - (row + 1) * self.row)

    def places_in_class(self, grid: tuple[int, ...], span: Span) -> torch.Tensor:
        """[n] int64, as `places`, but the picture's tokens are numbered as the class does (class_order)."""
        order, places = class_order(grid, self.along), self.places(span)
        if order is None:
            return places
        own = places < self.image
        return torch.where(own, order[places.where(own, 0)], places)

    def picture_rows(self, span: Span) -> torch.Tensor:
        """[m]: which of the tokens of `span`, counted from its start, are the picture's."""
        return (self.places(span) < self.image).nonzero()[:, 0]

    def reference_rows(self, span: Span) -> torch.Tensor:
        """[n - m]: the others."""
        return (self.places(span) >= self.image).nonzero()[:, 0]

    def reference_numbers(self, span: Span) -> torch.Tensor:
        """[n - m]: the others' numbers among all reference tokens."""
        places = self.places(span)
        return places[places >= self.image] - self.image
