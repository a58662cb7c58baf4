"""The arguments with which a class calls a block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a block: positional ones, and those by name."""


def tensor_places(leaves: Sequence[Any]) -> list[int]:
    """Where the tensors are among the leaves of a block's arguments."""
    return [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def by_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A block's arguments by their places: OwnBlock.returns has them."""
    found: dict[str, Any] = {}

    def add(place: str, value: Any) -> None:
        found[place] = value
        for index, each in enumerate(value) if isinstance(value, list | tuple) else ():
            add(f"{place}/{index}", each)

    for place, value in [*enumerate(args), *kwargs.items()]:
        add(str(place), value)
    return found
