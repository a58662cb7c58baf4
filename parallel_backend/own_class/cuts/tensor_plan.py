"""Tensor parallelism as data: the layers that are cut, the side of each cut, and the arguments with an axis of heads."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnBlock, OwnCut
from parallel_backend.core.spans import Shard, Span, split_units
from parallel_backend.own_class.calls.block_arguments import Arguments, tensor_places


class CutKind(Enum):
    """Which side of a layer is cut, and how the ranks' outputs are combined."""

    COLUMN = "column"
    """Output features are cut. The next layers take the rank's features without an exchange."""
    ROW = "row"
    """Input features are cut. The ranks' outputs are summed (all-reduce)."""
    GATHER = "gather"
    """Output features are cut, and gathered from all ranks (all-gather)."""
    NORM = "norm"
    """An RMSNorm over the output of a COLUMN layer. Its mean square is taken over all ranks' features."""


LayerCuts = Mapping[str, OwnCut]
"""Layer's name in the model -> its cut."""


def cut_of(plan: LayerCuts, parameter: str) -> OwnCut | None:
    """Cut of the layer that has `parameter`. None: the layer is not cut."""
    return plan.get(parameter.rpartition(".")[0])


def cut_side(cut: OwnCut, size: int, index: int, ranks: int) -> tuple[Span, ...]:
    """Rank `index`'s spans along the cut side, which has `size` features: one span for each part of the cut."""
    assert sum(cut.sizes) == size, "the plan's parts do not make up the weight"
    parts = zip(itertools.accumulate(cut.sizes), cut.sizes, cut.units or cut.sizes, strict=True)
    return tuple(split_units(Span(end - part, end), ranks, units)[index] for end, part, units in parts)


def axes_of_heads(args: Sequence[Any], kwargs: Mapping[str, Any], heads: set[int]) -> dict[int, list[tuple[int, int]]]:
    """Axis -> (number of tensor, axis) as in OwnBlock.headed, of float arguments whose size there is one of `heads`."""
    leaves, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    found: dict[int, list[tuple[int, int]]] = {}
    for number, place in enumerate(tensor_places(leaves)):
        for axis, size in enumerate(leaves[place].shape[:-1]) if leaves[place].is_floating_point() else ():
            if size in heads:
                found.setdefault(axis, []).append((number, axis))
    return found


def shard_of(cut: OwnCut, parameter: str, shape: Sequence[int], index: int, ranks: int) -> Shard | None:
    """Rank `index`'s shard of a cut layer's parameter. None: the rank has all of it."""
    is_row = cut.kind == CutKind.ROW.value
    if is_row and parameter.endswith("bias"):  # it is added once, by the first rank: partial results are added up
        return Shard(0, ()) if index else None
    return Shard(int(is_row), cut_side(cut, shape[int(is_row)], index, ranks))


def divide(module: nn.Module, block: OwnBlock, index: int, ranks: int) -> ExitStack:
    """Change a block's attributes with whole numbers, such as its head count, and its arguments with an axis of heads, to
    rank `index`'s share. Closing the stack undoes it."""
    undo = ExitStack()
    for (path, attribute), units in zip(block.divided, block.units or (0,) * len(block.divided), strict=True):
        holder = module.get_submodule(path)
        whole = getattr(holder, attribute)
        undo.callback(setattr, holder, attribute, whole)
        setattr(holder, attribute, len(split_units(Span(0, whole), ranks, units or whole)[index]))

    def with_own_heads(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = tensor_places(leaves)
        for number, axis in block.headed:
            tensor = leaves[tensors[number]]
            heads = split_units(Span(0, size := tensor.shape[axis]), ranks, block.head_units or size)[index]
            leaves[tensors[number]] = tensor.narrow(axis, heads.start, len(heads))
        return pytree.tree_unflatten(leaves, structure)

    if block.headed:  # a hook without a place would take the arguments of every call apart
        undo.enter_context(module.register_forward_pre_hook(with_own_heads, with_kwargs=True))
    return undo
