"""Tensor parallelism as data: which layers are cut, on which side, and which arguments have an axis of heads to cut."""

import itertools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from parallel_backend.core.own_class import OwnCut
from parallel_backend.core.spans import Span, split_units
from parallel_backend.own_class.calls.block_arguments import Arguments, tensor_places


class CutKind(Enum):
    """Which side of a layer is cut, and how the ranks' outputs are combined."""

    COLUMN = "column"
    """Output features. The next layers take the rank's features without an exchange."""
    ROW = "row"
    """Input features. The ranks' outputs are summed (all-reduce)."""
    GATHER = "gather"
    """Output features, followed by an all-gather."""
    NORM = "norm"
    """An RMSNorm over the output of a COLUMN layer. Its mean square is taken over all ranks' features."""


LayerCuts = Mapping[str, OwnCut]
"""Layer's name in the model -> its cut."""


def cut_of(plan: LayerCuts, parameter: str) -> OwnCut | None:
    """Cut of the layer of `parameter`. None: the layer is not cut."""
    return plan.get(parameter.rpartition(".")[0])


def cut_side(cut: OwnCut, size: int, index: int, ranks: int) -> tuple[Span, ...]:
    """Spans of rank `index` on a weight's cut side of `size` features: one span for each part."""
    assert sum(cut.sizes) == size, "the plan's parts do not make up the weight"
    parts = zip(itertools.accumulate(cut.sizes), cut.sizes, cut.units or cut.sizes, strict=True)
    return tuple(split_units(Span(end - part, end), ranks, units)[index] for end, part, units in parts)


def axes_of_heads(args: Sequence[Any], kwargs: Mapping[str, Any], heads: set[int]) -> dict[int, list[tuple[int, int]]]:
    """Axis -> places as OwnBlock.headed has them, of all arguments of floats with one of these sizes there. Not the last."""
    leaves, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    found: dict[int, list[tuple[int, int]]] = {}
    for number, place in enumerate(tensor_places(leaves)):
        for axis, size in enumerate(leaves[place].shape[:-1]) if leaves[place].is_floating_point() else ():
            if size in heads:
                found.setdefault(axis, []).append((number, axis))
    return found


def give_heads(block: nn.Module, places: Sequence[tuple[int, int, int]], rank: int, ranks: int) -> RemovableHandle:
    """Hook that cuts a block's arguments to a tensor rank's heads. `places`: (number of a tensor, axis, units) each, see
    OwnBlock.headed and OwnBlock.head_units."""

    def cut(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = tensor_places(leaves)
        for number, axis, units in places:
            tensor = leaves[tensors[number]]
            heads = split_units(Span(0, size := tensor.shape[axis]), ranks, units or size)[rank]
            leaves[tensors[number]] = tensor.narrow(axis, heads.start, len(heads))
        return pytree.tree_unflatten(leaves, structure)

    return block.register_forward_pre_hook(cut, with_kwargs=True)
