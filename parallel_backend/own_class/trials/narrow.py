"""A class with fewer heads, and widths in proportion: what takes minutes at its own width takes seconds.

The result is then tried once at the class's own width.
"""

import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.built.building import class_of
from parallel_backend.own_class.calls.tried_calls import Call

HEADS = re.compile(r"heads$")
"""Names of arguments that are numbers of heads."""
WIDTHS = re.compile(r"dim|size|width|channels|features")
"""Names of arguments that may be widths, if they are at least WIDE."""
WIDE = 512
FEWEST = 2
"""Heads that are left."""
MOST = 8
"""Times fewer heads, or narrower."""
CHANNELS = {"model_channels": 64}
"""Argument of UNets: channels of the first block. Other blocks have multiples of it."""


def narrowed(own: OwnClass, call: Call, tensor: int) -> Iterator[tuple[OwnClass, Call, int]]:
    """(narrower class, call for it, how many times fewer heads). Nothing for classes without heads among their arguments.

    Sizes of heads stay, and as many heads as `tensor` ranks can share: evenly if they so share all. Heads whose number the
    most of them do not go with, such as those of layers for text alone, stay, and then not. Widths that go with the heads
    are as many times narrower. First others are narrower too, which need not have anything to do with them, and last the
    text's stay.
    """
    given = numbers_of_class(own)
    heads = {name: value for name, value in given.items() if HEADS.search(name) and value > 0}  # -1: UNets' "not set"
    wide = {name: value for name, value in given.items() if WIDTHS.search(name) and value >= WIDE}
    alone = {name: value // max(each for each in range(1, MOST + 1) if value % each == 0) for name, value in wide.items()}
    of_call = {
        size for value in pytree.tree_leaves(dict(call.named)) if isinstance(value, torch.Tensor) for size in value.shape
    }
    tried: list[dict[str, int]] = []
    for factor in _factors(heads, tensor):
        of_heads = {name: value // factor for name, value in heads.items() if _fits(value, factor, tensor)}
        in_step = {name: value // factor for name, value in wide.items() if value % factor == 0}
        not_of_call = {name: width for name, width in in_step.items() if wide[name] not in of_call}
        for widths in (alone | in_step, in_step, not_of_call):
            if of_heads | widths in tried:
                continue
            tried.append(of_heads | widths)
            arguments = json.dumps(json.loads(own.arguments) | of_heads | widths)
            cut = {wide[name]: width for name, width in widths.items()}
            yield dataclasses.replace(own, arguments=arguments), _narrow(call, cut), factor


def _factors(heads: Mapping[str, int], tensor: int) -> list[int]:
    """The largest one for the most heads and those that go with them, such as heads of keys; and for all."""
    most = max(heads.values(), default=1)
    found = []
    for together in ([value for value in heads.values() if most % value == 0], list(heads.values())):
        fitting = (each for each in range(MOST, 1, -1) if all(_fits(one, each, tensor) for one in together))
        found += [factor for factor in [next(fitting, 1)] if factor > 1 and together]
    return list(dict.fromkeys(found))


def _fits(heads: int, factor: int, tensor: int) -> bool:
    """Whether so many heads can be so many times fewer, and are shared evenly if all are."""
    fewer, rest = divmod(heads, factor)
    return not rest and fewer >= max(FEWEST, tensor) and bool(fewer % tensor) == bool(heads % tensor)


def narrow_unet(unet: OwnClass) -> OwnClass:
    """The class with few channels: a UNet is tried with all of its blocks, and single entries do not depend on its width."""
    arguments = json.loads(unet.arguments)
    return dataclasses.replace(unet, arguments=json.dumps(arguments | (CHANNELS if set(CHANNELS) <= set(arguments) else {})))


def widened(blocks: Sequence[OwnBlock], factor: int | Fraction) -> list[OwnBlock]:
    """The blocks with `factor` times as many heads in their calls of attention: those of a class so many times wider."""
    found = []
    for block in blocks:
        attention = (dataclasses.replace(each, heads=int(each.heads * factor)) for each in block.attention)
        found.append(dataclasses.replace(block, attention=tuple(attention)))
    return found


def numbers_of_class(own: OwnClass) -> dict[str, int]:
    """The class's whole numbers among its arguments, also those that it has by default."""
    defaults = {name: each.default for name, each in inspect.signature(class_of(own)).parameters.items()}
    return {name: value for name, value in (defaults | json.loads(own.arguments)).items() if type(value) is int}


def _narrow(call: Call, widths: Mapping[int, int]) -> Call:
    """The call, whose tensors of these widths, of a sum of two or a multiple of one, have the first of their features.

    `widths`: how many, by width.
    """
    sums = {one + other: widths[one] + widths[other] for one, other in itertools.combinations(widths, 2)}

    def cut(value: torch.Tensor) -> torch.Tensor:
        width = value.shape[-1] if value.ndim else 0
        multiples = {each * (width // each): widths[each] * (width // each) for each in sorted(widths, reverse=True)}
        return value[..., : {**multiples, **sums, **widths}.get(width)] if width else value

    named: dict[str, Any] = pytree.tree_map_only(torch.Tensor, cut, dict(call.named))
    return dataclasses.replace(call, named=named)
