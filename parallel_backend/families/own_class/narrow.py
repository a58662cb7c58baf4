"""A class with fewer heads, and widths in proportion: what takes minutes at its own width takes seconds.

What is found so is tried at the class's own width once.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnBlock, OwnClass

from .building import class_of
from .tried_calls import Call

HEADS = re.compile(r"(^|_)heads$")
"""Names of arguments that are numbers of heads."""
WIDTHS = re.compile(r"dim|size|width|channels")
"""Of arguments that may be widths, if they are at least WIDE."""
WIDE = 512
FEWEST = 2
"""Heads that are left."""
MOST = 8
"""Times narrower."""
CHANNELS = {"model_channels": 64}
"""Argument of UNets: channels of the first block, of which others have multiples."""


def narrowed(own: OwnClass, call: Call, tensor: int) -> Iterator[tuple[OwnClass, Call, int]]:
    """(narrower class, call for it, how many times narrower), first with its text's widths narrower too. Nothing for classes
    without heads among their arguments. Sizes of heads stay, and as many heads as `tensor` ranks can share."""
    given = _numbers(own)
    heads = [value for name, value in given.items() if HEADS.search(name)]
    factors = [
        factor
        for factor in range(MOST, 1, -1)
        if all(each % factor == 0 and each // factor >= FEWEST and each // factor % tensor == 0 for each in heads)
    ]
    if not heads or not factors:
        return
    factor = factors[0]
    wide = {name: value for name, value in given.items() if WIDTHS.search(name) and value >= WIDE and value % factor == 0}
    of_heads = {name: value // factor for name, value in given.items() if HEADS.search(name)}
    of_call = {
        size for value in pytree.tree_leaves(dict(call.named)) if isinstance(value, torch.Tensor) for size in value.shape
    }
    for kept in (set(), of_call):
        widths = {name: value // factor for name, value in wide.items() if value not in kept}
        arguments = json.dumps(json.loads(own.arguments) | of_heads | widths)
        cut = {wide[name] for name in widths}
        yield dataclasses.replace(own, arguments=arguments), _narrow(call, cut, factor), factor


def narrow_unet(unet: OwnClass) -> OwnClass:
    """The class with few channels: a UNet is tried with all of its blocks, and single entries do not depend on its width."""
    arguments = json.loads(unet.arguments)
    return dataclasses.replace(unet, arguments=json.dumps(arguments | (CHANNELS if set(CHANNELS) <= set(arguments) else {})))


def widened(blocks: Sequence[OwnBlock], factor: int) -> list[OwnBlock]:
    """Blocks of a narrower class, with so many times as many heads."""
    return [
        dataclasses.replace(
            block, attention=tuple(dataclasses.replace(each, heads=factor * each.heads) for each in block.attention)
        )
        for block in blocks
    ]


def _numbers(own: OwnClass) -> dict[str, int]:
    """The class's whole numbers among its arguments, also those that it has by default."""
    defaults = {name: each.default for name, each in inspect.signature(class_of(own)).parameters.items()}
    return {name: value for name, value in (defaults | json.loads(own.arguments)).items() if type(value) is int}


def _narrow(call: Call, widths: set[int], factor: int) -> Call:
    """The call, whose tensors of these widths have the first of their features."""

    def cut(value: torch.Tensor) -> torch.Tensor:
        return value[..., : value.shape[-1] // factor] if value.ndim and value.shape[-1] in widths else value

    named: dict[str, Any] = pytree.tree_map_only(torch.Tensor, cut, dict(call.named))
    return dataclasses.replace(call, named=named)
