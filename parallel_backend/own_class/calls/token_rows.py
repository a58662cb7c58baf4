"""Tokens on several axes, such as frames, rows and columns, as rows of one axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_backend.core.own_class import OwnSlice
from parallel_backend.own_class.calls.unproven import Unproven


def in_rows(tensor: torch.Tensor, cut: OwnSlice) -> torch.Tensor:
    """[..., frames, rows, columns, ...] -> [B, tokens, D]"""
    return tensor.flatten(cut.axis, cut.axis + cut.axes - 1).movedim(cut.axis, 1)


@dataclass(frozen=True)
class TokenAxes:
    """Where the tokens are in tensors of as many axes as the one that entered the blocks, and their sizes there."""

    cut: OwnSlice
    sizes: tuple[int, ...]

    def of_rows(self, rows_BSD: torch.Tensor) -> torch.Tensor:
        """The inverse of `in_rows`. Its sizes are those that entered if the rows are all tokens."""
        of_all = rows_BSD.shape[1] == math.prod(self.sizes)
        sizes = self.sizes if of_all else (*(1,) * (len(self.sizes) - 1), rows_BSD.shape[1])
        return rows_BSD.movedim(1, self.cut.axis).unflatten(self.cut.axis, sizes)


def token_count(shape: Sequence[int], cut: OwnSlice) -> int:
    """Tokens of a tensor of this shape."""
    return math.prod(shape[cut.axis : cut.axis + cut.axes])


def token_axes(shape: Sequence[int], other: Sequence[int], batch: int) -> tuple[int, int]:
    """(first axis of tokens, how many) of a stream: all but its batch and its channels, which are the last axis.

    `other`: its shape in a call with other numbers of tokens. Unproven if it has no such axes.
    """
    axes = len(shape) - 2
    if axes == 1:
        return 1, 1
    for first, of_batch in ((1, 0), (0, axes)):
        if axes > 1 and shape[of_batch] == other[of_batch] == batch:
            return first, axes
    raise Unproven("its blocks get tokens whose batch is neither the first nor the last axis but one")
