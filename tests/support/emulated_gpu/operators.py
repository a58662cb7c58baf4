"""What the schemas of torch's operators say of their tensors."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

WHOLE = frozenset(("scaled_dot_product_attention", "linear", "matmul"))
LIKE = frozenset(
    (
        *("empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    )
)
"""Operators that read shape and dtype of their first argument, and no value."""


class Operator(NamedTuple):
    """What its schema says of an operator."""

    name: str
    composite: bool
    mutated: tuple[str, ...]
    view: bool
    like: bool


@functools.cache
def operator_of(func: OpOverload) -> Operator:
    schema, key = func._schema, torch._C.DispatchKey.CompositeImplicitAutograd
    name = schema.name.removeprefix("aten::")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) and key not in func.py_kernels
    mutated = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return Operator(name, composite and name not in WHOLE, mutated, view, name in LIKE)


def mutated_by(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Those of a call's tensors that it writes to."""
    about, found = operator_of(func), list[torch.Tensor]()
    for position, argument in enumerate(func._schema.arguments if about.mutated else ()):
        if argument.name in about.mutated:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            found += leaves([value])
    return found


def leaves(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from leaves(value)
