"""Arguments of a block with an axis of heads, such as rotary tables of each head, of which tensor ranks have their part."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from parallel_backend.core.spans import Span, split_units
from parallel_backend.own_class.calls.block_arguments import Arguments, tensor_places


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
    """Have the block get a tensor rank's heads of the arguments at these places, see OwnBlock.headed, with the units of
    each, see OwnBlock.head_units."""

    def cut(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = tensor_places(leaves)
        for number, axis, units in places:
            tensor = leaves[tensors[number]]
            heads = split_units(Span(0, size := tensor.shape[axis]), ranks, units or size)[rank]
            leaves[tensors[number]] = tensor.narrow(axis, heads.start, len(heads))
        return pytree.tree_unflatten(leaves, structure)

    return block.register_forward_pre_hook(cut, with_kwargs=True)
