"""The arguments with which a class calls a block, and their axes of tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.core.own_class import OwnSlice
from parallel_backend.own_class.calls.unproven import Unproven

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a block."""


def tensor_places(leaves: Sequence[Any]) -> list[int]:
    """Return the indices of the tensors in the flattened list of a block's arguments."""
    return [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def by_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A block's arguments by place, as OwnBlock.returns names them: "0" or "x" for an argument, "0/1" for an item of it."""
    found: dict[str, Any] = {}

    def add(place: str, value: Any) -> None:
        found[place] = value
        for index, each in enumerate(value) if isinstance(value, list | tuple) else ():
            add(f"{place}/{index}", each)

    for place, value in [*enumerate(args), *kwargs.items()]:
        add(str(place), value)
    return found


def in_rows(tensor: torch.Tensor, cut: OwnSlice) -> torch.Tensor:
    """Return a tensor with several axes of tokens, such as [B, frames, rows, columns, D], as [B, tokens, D]."""
    return tensor.flatten(cut.axis, cut.axis + cut.axes - 1).movedim(cut.axis, 1)


@dataclass(frozen=True)
class TokenAxes:
    """The axes of tokens in a stream that entered the blocks, and their sizes. Tensors with as many axes have the same."""

    cut: OwnSlice
    sizes: tuple[int, ...]

    def of_rows(self, rows_BSD: torch.Tensor) -> torch.Tensor:
        """The inverse of `in_rows`. All tokens get the sizes that entered; a part of them becomes one row of one frame."""
        of_all = rows_BSD.shape[1] == math.prod(self.sizes)
        sizes = self.sizes if of_all else (*(1,) * (len(self.sizes) - 1), rows_BSD.shape[1])
        return rows_BSD.movedim(1, self.cut.axis).unflatten(self.cut.axis, sizes)


def token_count(shape: Sequence[int], cut: OwnSlice) -> int:
    """Return the number of tokens in a tensor of this shape."""
    return math.prod(shape[cut.axis : cut.axis + cut.axes])


def token_axes(shape: Sequence[int], other: Sequence[int], batch: int) -> tuple[int, int]:
    """Return (first axis of tokens, number of such axes) of a stream: all axes except the batch and the channels, which are
    last. `other`: the stream's shape in a call with other numbers of tokens. Raises Unproven if the axes cannot be found
    out."""
    axes = len(shape) - 2
    if axes == 1:
        return 1, 1
    for first, of_batch in ((1, 0), (0, axes)):
        if axes > 1 and shape[of_batch] == other[of_batch] == batch:
            return first, axes
    raise Unproven("its blocks get tokens whose batch is neither the first nor the last axis but one")
