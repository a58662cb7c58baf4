"""Builds models for a trial, with weights and a small call: with few blocks, and with fewer heads and smaller widths. With
fewer heads a trial takes seconds instead of minutes. Its result is then tried once at the class's own width."""

import dataclasses
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.host_memory import host_memory
from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.built.building import build, class_of
from parallel_backend.own_class.calls.call_arguments import LATENTS
from parallel_backend.own_class.calls.tried_calls import (
    SIZES,
    Call,
    does_not_run,
    draw_weights,
    drawn,
    noise_lengths,
    smaller,
    with_whole_axes,
)
from parallel_backend.own_class.plans.block_order import (
    DEPTH,
    FEWEST_BLOCKS,
    FIRST_ALONE,
    FIRST_OF_SEVERAL,
    FIRST_READ,
    Representatives,
    block_lists,
    list_of,
    recorded_blocks,
    representatives,
    shortened,
)
from parallel_backend.own_class.trials.stage_trial import noted_run

HEADS = re.compile(r"heads$")
"""Names of arguments that are numbers of heads."""
WIDTHS = re.compile(r"dim|size|width|channels|features")
"""Names of arguments that are widths if their value is at least WIDE."""
WIDE = 512
FEWEST = 2
"""Minimum number of heads of a narrower class."""
MOST = 8
"""Largest factor by which a class is made narrower."""
CHANNELS = {"model_channels": 64}
"""Argument of UNets -> its value in a trial: channels of the first block. Other blocks have multiples of it."""


def narrowed(own: OwnClass, call: Call, tensor: int) -> Iterator[tuple[OwnClass, Call, int]]:
    """(narrower class, call for it, factor by which heads are fewer). Nothing if the class has no numbers of heads.

    Head sizes stay. There are at least as many heads as `tensor` ranks need, and they split evenly if all of the class's do.
    Numbers of heads that do not fit the largest one, such as those of text layers, are first kept, then reduced too. Widths
    that are multiples of the factor are reduced by it. The first choice also narrows other widths; the last keeps those of
    the text.
    """
    given = {} if own.unet else numbers_of_class(own)
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
            cut = {wide[name]: width for name, width in widths.items()}
            yield with_arguments(own, of_heads | widths), _narrow(call, cut), factor


def with_arguments(own: OwnClass, changes: Mapping[str, int]) -> OwnClass:
    """Return the class with other values of these arguments."""
    return dataclasses.replace(own, arguments=json.dumps(json.loads(own.arguments) | changes))


def _factors(heads: Mapping[str, int], tensor: int) -> list[int]:
    """Return the factors to try. A factor divides numbers of `heads`. At most three are tried: the largest that fits the
    highest number and its divisors, such as key heads; the largest that fits all numbers; and the largest that leaves key
    heads as they are."""
    most = max(heads.values(), default=1)
    keys = [value for value in heads.values() if most % value == 0]
    found = []
    for together in (keys, list(heads.values())):
        fitting = (each for each in range(MOST, 1, -1) if all(_fits(one, each, tensor) for one in together))
        found += [factor for factor in [next(fitting, 1)] if factor > 1 and together]
    of_most = (each for each in range(MOST, 1, -1) if _fits(most, each, tensor))
    found += [each for each in of_most if not any((most // each) % one for one in keys if one < most)][:1]
    return list(dict.fromkeys(found))


def _fits(heads: int, factor: int, tensor: int) -> bool:
    """Whether this number of heads can be divided by `factor` and still be split over `tensor` ranks as evenly as before."""
    fewer, rest = divmod(heads, factor)
    return not rest and fewer >= max(FEWEST, tensor) and bool(fewer % tensor) == bool(heads % tensor)


def narrow_unet(own: OwnClass) -> OwnClass:
    """Return a UNet's class with few channels; other classes stay. A UNet is tried with all of its blocks; whether entries
    are independent does not depend on its width."""
    return with_arguments(own, CHANNELS) if own.unet and set(CHANNELS) <= set(json.loads(own.arguments)) else own


def widened(blocks: Sequence[OwnBlock], factor: int | Fraction) -> list[OwnBlock]:
    """Return the blocks with `factor` times as many heads in their attention calls."""
    found = []
    for block in blocks:
        attention = (dataclasses.replace(each, heads=int(each.heads * factor)) for each in block.attention)
        found.append(dataclasses.replace(block, attention=tuple(attention)))
    return found


def numbers_of_class(own: OwnClass) -> dict[str, int]:
    """Return the class's integer arguments, including defaults, by name."""
    defaults = {name: each.default for name, each in inspect.signature(class_of(own)).parameters.items()}
    return {name: value for name, value in (defaults | json.loads(own.arguments)).items() if type(value) is int}


def _narrow(call: Call, widths: Mapping[int, int]) -> Call:
    """Return the call with narrower tensors. `widths`: width -> new width; applied to tensors whose last axis has that size,
    a multiple of it, or the sum of two of them. The first features are kept."""
    sums = {one + other: widths[one] + widths[other] for one, other in itertools.combinations(widths, 2)}

    def cut(value: torch.Tensor) -> torch.Tensor:
        width = value.shape[-1] if value.ndim else 0
        multiples = {each * (width // each): widths[each] * (width // each) for each in sorted(widths, reverse=True)}
        return value[..., : {**multiples, **sums, **widths}.get(width)] if width else value

    named: dict[str, Any] = pytree.tree_map_only(torch.Tensor, cut, dict(call.named))
    return dataclasses.replace(call, named=named)


SEED = 0


@dataclass(frozen=True)
class Short:
    """A model with few blocks of each list."""

    model: nn.Module
    build: Callable[[OwnClass], nn.Module]
    """Builds such a model, without weights, of the class with any widths."""
    lists: Mapping[str, Sequence[str]]
    """List -> names of all blocks of the class."""
    kept: Mapping[str, Sequence[str]]
    """List -> names of the blocks that the model has."""
    like: Representatives
    actual: Call
    call: Call
    """A small call like `actual`."""


def _built_short(lists: Mapping[str, Sequence[str]], like: Representatives, own: OwnClass) -> nn.Module:
    model = build(own)
    shortened(model, lists, like)
    return model


def _built_shallower(depths: Mapping[str, int], own: OwnClass) -> nn.Module:
    return build(with_arguments(own, depths))


def short_model(own: OwnClass, actual: Call, poll: Callable[..., None]) -> Short:
    """Return a model of the class with few blocks that runs with calls like `actual`. Raises ValueError if the class does
    not run. `poll` is called before each run of the model or of a block."""
    in_full = build(own)
    lists = {} if own.unet else block_lists(in_full)
    for like in _tried_representatives(in_full, lists):
        make = functools.partial(_built_short, lists, like)
        model = make(own)
        kept = {name: [f"{name}.{key}" for key, _ in model.get_submodule(name).named_children()] for name in lists}
        give_weights(own, model, poll)
        if LATENTS in actual.named:
            actual = with_whole_axes(actual, functools.partial(runs, model))
        of_all_words = dataclasses.replace(actual, whole_text=True)
        smaller_calls = ((like_it, smaller(like_it, *size)) for like_it in (actual, of_all_words) for size in SIZES)
        for like_it, call in (*smaller_calls, (actual, actual)):
            try:
                drawn(call, 1).run(model)
            except Exception as error:  # of any kind: its code is not known
                failed = error
            else:
                short = Short(model, make, lists, kept, like, like_it, call)
                return _with_all_running(own, short, poll) if len(lists) > 1 else short
    raise does_not_run(own, call, str(failed))


def _with_all_running(own: OwnClass, short: Short, poll: Callable[..., None]) -> Short:
    """Return the same model; or, if some blocks of a list do not run, a shallower one built by the class's own arguments."""
    lists = _left_out(short.model, short.kept, short.call)
    for depths, left in shallower(own, {name: short.lists[name] for name in lists}) if any(lists.values()) else ():
        make = functools.partial(_built_shallower, depths)
        model = make(own)
        kept = block_lists(model)
        if set(kept) != set(short.lists) or any(len(kept[name]) != count for name, count in left.items()):
            continue
        give_weights(own, model, poll)
        if runs(model, short.call) and not any(_left_out(model, kept, short.call).values()):
            last = {name: len(blocks) - 1 for name, blocks in kept.items()}
            like = {
                name: [*(min(number, last[name] - 1) for number in range(len(blocks) - 1)), last[name]]
                for name, blocks in short.lists.items()
            }
            return dataclasses.replace(short, model=model, build=make, kept=kept, like=like)
    return short


def _left_out(model: nn.Module, kept: Mapping[str, Sequence[str]], call: Call) -> dict[str, int]:
    """Return list -> number of its blocks that do not run in the call. Lists in which no block runs are left out."""
    (ran,), _ = recorded_blocks(model, kept, [drawn(call, 1)])
    return {
        name: len(kept[name]) - sum(list_of(block) == name for block in ran) for name in dict.fromkeys(map(list_of, ran))
    }


def give_weights(own: OwnClass, model: nn.Module, poll: Callable[..., None], idle: Sequence[str] = ()) -> None:
    """Give a model random weights, except modules in `idle`. Raises ValueError if host memory is short of twice their
    size."""
    free, nbytes = host_memory()[0], 4 * sum(noise_lengths(model, idle).values())
    if 2 * nbytes > free:
        raise ValueError(
            f"model_name: trying ComfyUI's class {own.name} takes {nbytes / 1e9:.1f} GB of host memory, but only "
            f"{free / 1e9:.1f} GB are free. Half of it stays for other programs. Close some, or load the model with "
            "ComfyUI's own loader."
        )
    draw_weights(model, SEED, idle, share=True)
    for module in (model, *(model.get_submodule(block) for blocks in block_lists(model).values() for block in blocks)):
        module.register_forward_pre_hook(poll)


def _tried_representatives(model: nn.Module, lists: Mapping[str, Sequence[str]]) -> Iterator[Representatives]:
    """Choices of blocks to keep, tried until the class runs with one, because a class may need all blocks of a list. A few
    of each list, another few, all of one list (the smallest first), and all of all lists."""
    few = representatives(model, lists, FIRST_ALONE if len(lists) == 1 else FIRST_OF_SEVERAL)
    yield few
    of_two_kinds = representatives(model, lists, FIRST_READ)
    if lists and all(max(like) == FIRST_READ + 1 for like in of_two_kinds.values()):  # and the last block
        yield of_two_kinds
    if len(lists) > 1:
        sizes = {name: sum(each.numel() for each in model.get_submodule(name).parameters()) for name in lists}
        yield from (few | {name: range(len(lists[name]))} for name in sorted(lists, key=lambda name: sizes[name]))
    if lists:
        yield {name: range(len(blocks)) for name, blocks in lists.items()}


def runs(model: nn.Module, call: Call) -> bool:
    """Whether the class runs with the call."""
    return noted_run(model, drawn(call, 1)) is not None


MOST_BLOCKS = 16
"""Maximum number of blocks that are kept of all lists together."""


def shallower(own: OwnClass, lists: Mapping[str, Sequence[str]]) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Yield (arguments with which the class has shorter lists of blocks, list -> its length), the shortest first. The
    shortest list has FEWEST_BLOCKS and others twice as many, or all lists are shorter by the same factor."""
    lengths = {name: len(blocks) for name, blocks in lists.items()}
    numbers = numbers_of_class(own)
    depths = {name: value for name, value in numbers.items() if value in lengths.values() and DEPTH.search(name)}
    least = min(lengths.values())

    ways = [{length: FEWEST_BLOCKS * (1 if length == least else 2) for length in lengths.values()}]
    for factor in range(least // FEWEST_BLOCKS, 0, -1):
        if not any(length % factor for length in lengths.values()):
            ways.append({length: length // factor for length in lengths.values()})
    for way in ways:
        left = {name: way[length] for name, length in lengths.items()}
        if sum(left.values()) <= MOST_BLOCKS:
            yield {name: way[value] for name, value in depths.items()}, left
