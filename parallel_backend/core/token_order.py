"""The order of image tokens: those of the image, and those of reference images (Flux Kontext, Qwen-Image-Edit).

Reference tokens go through the blocks like image tokens, but their output is dropped. An equal share of them follows every
token row of the image, so that bands have equal lengths.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import torch

from .spans import Span, split


def class_order(grid: tuple[int, ...], along: str) -> torch.Tensor | None:
    """[N]: position in this order -> position in the order of classes (frames, rows, columns). None: both are equal. `grid`:
    (frames,) rows, columns. `along`: see TokenOrder."""
    if len(grid) == 2 or along == "frames" or grid[0] == 1:
        return None
    return torch.arange(torch.Size(grid).numel()).view(grid).transpose(0, 1).flatten()


@dataclass(frozen=True)
class TokenOrder:
    """Positions, from 0, of the image tokens of a call."""

    image: int
    """Number of image tokens."""
    row: int
    """Number of image tokens in a row; if `along` is "frames", in a frame."""
    references: int = 0
    """Number of tokens of all reference images together."""
    along: str = "rows"
    """The image's axis by which tokens are ordered first, see Patching.along."""

    @property
    def tokens(self) -> int:
        return self.image + self.references

    @cached_property
    def span(self) -> Span:
        return Span(0, self.tokens)

    @cached_property
    def _starts(self) -> list[int]:
        """Position of each row's first token; the last item is `tokens`."""
        rows = self.image // self.row
        shares = split(Span(0, self.references), rows)
        return [index * self.row + share.start for index, share in enumerate(shares)] + [self.tokens]

    def of_rows(self, rows: Span) -> Span:
        """Return the positions of the tokens of `rows`, including the reference tokens after each row."""
        return Span(self._starts[rows.start], self._starts[rows.stop])

    def images(self, span: Span) -> Span:
        """Return the image tokens in `span`, counted without reference tokens."""
        return Span(self._images_before(span.start), self._images_before(span.stop))

    def _images_before(self, place: int) -> int:
        if place == self.tokens:
            return self.image
        row = bisect_right(self._starts, place) - 1
        return row * self.row + min(place - self._starts[row], self.row)

    def places(self, span: Span) -> torch.Tensor:
        """[n] int64: for each position in `span` the image token's number, or `image` + the reference token's number."""
        index = torch.arange(span.start, span.stop)
        starts = torch.tensor(self._starts[:-1])
        row = torch.searchsorted(starts, index, right=True) - 1
        inside = index - starts[row]
        return torch.where(inside < self.row, row * self.row + inside, self.image + index - (row + 1) * self.row)

    def places_in_class(self, grid: tuple[int, ...], span: Span) -> torch.Tensor:
        """[n] int64, as `places`, but image tokens have the numbers of the class (class_order)."""
        order, places = class_order(grid, self.along), self.places(span)
        if order is None:
            return places
        of_picture = places < self.image
        return torch.where(of_picture, order[places.where(of_picture, 0)], places)

    def picture_rows(self, span: Span) -> torch.Tensor:
        """[m]: indices of the image tokens in `span`, relative to its start."""
        return (self.places(span) < self.image).nonzero()[:, 0]
