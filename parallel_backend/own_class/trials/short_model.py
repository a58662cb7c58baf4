"""A model of few blocks for a trial, with weights, and a small call with which it runs."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from parallel_backend.core.host_memory import host_memory
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.call_arguments import LATENTS
from parallel_backend.own_class.calls.tried_calls import (
    SIZES,
    Call,
    does_not_run,
    draw_weights,
    drawn,
    smaller,
    with_whole_axes,
)
from parallel_backend.own_class.plans.block_order import (
    DEPTH,
    FEWEST_BLOCKS,
    Representatives,
    block_lists,
    list_of,
    recorded_blocks,
    representatives,
    representatives_of_two_kinds,
    shortened,
)
from parallel_backend.own_class.trials.narrow import numbers_of_class

SEED = 0


@dataclass(frozen=True)
class Short:
    """A model with few blocks of each list."""

    own: OwnClass
    """The model's class: the one that is tried, or the same with arguments for fewer blocks."""
    model: nn.Module
    lists: Mapping[str, Sequence[str]]
    """Names of all blocks of the class, by list."""
    kept: Mapping[str, Sequence[str]]
    """Names of the blocks that the model has, by list."""
    like: Representatives
    actual: Call
    call: Call
    """A small call like `actual`."""
    is_shortened: bool = True
    """Blocks were taken out of the model. False: its class was built with fewer."""

    def another(self) -> nn.Module:
        """A model like it without weights."""
        model = build(self.own)
        if self.is_shortened:
            shortened(model, self.lists, self.like)
        return model


def short_model(own: OwnClass, actual: Call, poll: Callable[..., None]) -> Short:
    """A model of the class with few blocks that runs with calls like `actual`. `poll` is called before each run of it or a
    block. ValueError if the class does not run."""
    in_full = build(own)
    lists = {} if own.unet else block_lists(in_full)
    for like in _tried_representatives(in_full, lists):
        model = build(own)
        kept = shortened(model, lists, like)
        give_weights(own, model, poll)
        if LATENTS in actual.named:
            actual = with_whole_axes(actual, functools.partial(runs, model))
        for call in (*(smaller(actual, *size) for size in SIZES), actual):
            if (error := _error_of(model, call)) is None:
                short = Short(own, model, lists, kept, like, actual, call)
                return _with_all_running(own, short, poll) if len(lists) > 1 else short
    raise does_not_run(own, call, str(error))


def _with_all_running(own: OwnClass, short: Short, poll: Callable[..., None]) -> Short:
    """The same model. If only some blocks of a list run in it, one with fewer blocks by the class's own arguments."""
    lists = _left_out(short.model, short.kept, short.call)
    for fewer, left in shallower(own, {name: short.lists[name] for name in lists}) if any(lists.values()) else ():
        model = build(fewer)
        kept = block_lists(model)
        if set(kept) != set(short.lists) or any(len(kept[name]) != count for name, count in left.items()):
            continue
        give_weights(own, model, poll)
        if runs(model, short.call) and not any(_left_out(model, kept, short.call).values()):
            like = representatives_of_shallower(short.lists, kept)
            return dataclasses.replace(short, own=fewer, model=model, kept=kept, like=like, is_shortened=False)
    return short


def _left_out(model: nn.Module, kept: Mapping[str, Sequence[str]], call: Call) -> dict[str, int]:
    """List -> number of its blocks that do not run in the call. Lists without a block that runs are left out."""
    (ran,), _ = recorded_blocks(model, kept, [drawn(call, 1)])
    return {
        name: len(kept[name]) - sum(list_of(block) == name for block in ran) for name in dict.fromkeys(map(list_of, ran))
    }


def give_weights(own: OwnClass, model: nn.Module, poll: Callable[..., None], idle: Sequence[str] = ()) -> None:
    """Weights for a model that has none, if host memory has room for them twice. Modules in `idle` get none."""
    free = host_memory()[0]
    of_idle = sum(_values(model.get_submodule(name)) for name in idle)
    nbytes = 4 * (_values(model) - of_idle)
    if 2 * nbytes > free:
        raise ValueError(
            f"model_name: trying ComfyUI's class {own.name} takes {nbytes / 1e9:.1f} GB of host memory, but only "
            f"{free / 1e9:.1f} GB are free. Half of it stays for other programs. Close some, or load the model with "
            "ComfyUI's own loader."
        )
    draw_weights(model, SEED, idle)
    for module in (model, *(model.get_submodule(block) for blocks in block_lists(model).values() for block in blocks)):
        module.register_forward_pre_hook(poll)


def _values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _tried_representatives(model: nn.Module, lists: Mapping[str, Sequence[str]]) -> Iterator[Representatives]:
    """Choices of blocks to try, until the class runs with one: a few of each list, another few, all of one list (the
    smallest first), and all of all lists. A class may count on all blocks of a list."""
    few = representatives(model, lists)
    yield few
    if lists and (of_ends := representatives_of_two_kinds(model, lists)) is not None:
        yield of_ends
    if len(lists) > 1:
        yield from (
            few | {name: range(len(lists[name]))} for name in sorted(lists, key=lambda at: _values(model.get_submodule(at)))
        )
    if lists:
        yield {name: range(len(blocks)) for name, blocks in lists.items()}


def runs(model: nn.Module, call: Call) -> bool:
    """Whether the class runs with the call."""
    return _error_of(model, call) is None


def _error_of(model: nn.Module, call: Call) -> Exception | None:
    """The exception that the class raises for the call. Any kind, since its code is unknown. None: it raises none."""
    try:
        drawn(call, 1).run(model)
    except Exception as error:
        return error
    return None


MOST_BLOCKS = 16
"""Maximum number of blocks of all lists that are kept."""


def shallower(own: OwnClass, lists: Mapping[str, Sequence[str]]) -> Iterator[tuple[OwnClass, dict[str, int]]]:
    """The class with these lists shorter, the shortest first, and how long they are then, if the class takes its arguments
    so: the shortest list has FEWEST_BLOCKS, and others twice as many, or each is as many times shorter."""
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
            arguments = json.loads(own.arguments) | {name: way[value] for name, value in depths.items()}
            yield dataclasses.replace(own, arguments=json.dumps(arguments)), left


def representatives_of_shallower(
    lists: Mapping[str, Sequence[str]], kept: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[int]]:
    """block_order.Representatives of a model with the lists `kept`, of a class with `lists`."""
    return {
        name: [*(min(number, len(kept[name]) - 2) for number in range(len(blocks) - 1)), len(kept[name]) - 1]
        for name, blocks in lists.items()
    }
