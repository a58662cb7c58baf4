"""Finds a class's lists of blocks, the order in which a call runs the blocks, and the shapes that they return."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.own_class.calls.block_arguments import by_place
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.calls.unproven import Unproven

FIRST_ALONE, FIRST_OF_SEVERAL, FIRST_READ = 2, 1, 4
"""How many first blocks of a list are tried: if it is the model's only list, if there are several, and if blocks of another
kind come later, which may read the outputs of the first ones."""
FEWEST_BLOCKS = 2
"""Minimum number of tried blocks of a list: the first and the last."""
NO_LIST = "it has no list of blocks"
DEPTH = re.compile("depth|layers|blocks")
"""Matches names of a model's attributes that are numbers of blocks."""
Representatives = Mapping[str, Sequence[int]]
"""Name of a list -> for each of its blocks, which of the list's tried blocks represents it, by index."""


def block_lists(model: nn.Module) -> dict[str, list[str]]:
    """Return name of a list -> names of its blocks. Lists are the outermost module lists whose modules have one type and
    contain layers. A list of lists does not count."""
    found: dict[str, list[str]] = {}
    lists = nn.ModuleList | nn.ModuleDict
    for name, module in model.named_modules():
        children = list(module.children())
        if not isinstance(module, lists) or len(set(map(type, children))) != 1 or isinstance(children[0], lists):
            continue
        if any(children[0].children()) and not any(name.startswith(f"{each}.") for each in found):
            found[name] = [f"{name}.{key}" for key, _ in module.named_children()]
    return found


def choices(
    model: nn.Module, lists: Mapping[str, Sequence[str]], kept: Mapping[str, Sequence[str]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield choices of lists to share out, and their fraction of all lists' parameters. The best is first: all lists, then
    all without the smallest, and so on. Other lists, such as refiners whose output several blocks read, run completely on
    every stage."""

    def size(name: str) -> float:
        parameters = sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
        return parameters / len(kept[name]) * len(lists[name])

    sizes = {name: size(name) for name in kept}
    by_size = sorted(kept, key=lambda name: sizes[name], reverse=True)
    for count in range(len(by_size), 0, -1):
        shared = tuple(name for name in kept if name in by_size[:count])
        yield shared, sum(sizes[name] for name in shared) / sum(sizes.values())


def representatives(model: nn.Module, lists: Mapping[str, Sequence[str]], first: int) -> dict[str, Sequence[int]]:
    """Choose the blocks to try: the `first` ones of a list, its last one, and the first of each kind between them. Blocks
    are of one kind if their parameters have the same names and shapes."""
    found: dict[str, Sequence[int]] = {}
    for name, blocks in lists.items():
        kinds = [_parameters(model.get_submodule(block)) for block in blocks]
        like: list[int] = []
        tried: list[int] = []
        for number, kind in enumerate(kinds):
            same = [place for place, other in enumerate(tried) if kinds[other] == kind]
            if number < first or number == len(blocks) - 1 or not same:
                same = [len(tried)]
                tried.append(number)
            like.append(same[-1])
        found[name] = like
    return found


def _parameters(block: nn.Module) -> frozenset[tuple[str, torch.Size]]:
    return frozenset((name, parameter.shape) for name, parameter in block.named_parameters())


def shortened(model: nn.Module, lists: Mapping[str, Sequence[str]], like: Representatives) -> dict[str, list[str]]:
    """Remove the blocks that are not tried from the model's lists, and correct the numbers of blocks that the model stores.
    Returns the names of the remaining blocks."""
    kept = {}
    for name, blocks in lists.items():
        module = model.get_submodule(name)
        keys = [block.rpartition(".")[2] for block in blocks]
        stay = [keys[like[name].index(number)] for number in range(len(set(like[name])))]
        for key in keys:
            if key not in stay:
                del module._modules[key]
        if isinstance(module, nn.ModuleList) and len(stay) < len(keys):
            members = [module._modules.pop(key) for key in stay]
            stay = [str(index) for index in range(len(members))]
            module._modules.update(zip(stay, members, strict=True))
        for attribute, value in vars(model).items():
            if type(value) is int and value == len(keys) and DEPTH.search(attribute):
                setattr(model, attribute, len(stay))
        kept[name] = [f"{name}.{key}" for key in stay]
    return kept


@dataclass(frozen=True)
class RecordedBlock:
    """What a block did in one call. `reads`: earlier blocks of its list whose output it got as argument. `returns`: for each
    returned value, the arguments with the same shape and dtype; None for a value that is None. `alone`: the block returns
    one tensor, not a tuple."""

    name: str
    returns: tuple[frozenset[str] | None, ...]
    alone: bool
    reads: frozenset[str]

    def with_another(self, other: "RecordedBlock") -> OwnBlock | None:
        """Return the OwnBlock for this block. `other`: the same block in a call of another size.

        Each returned value is matched to an argument that has its shape and dtype in both calls. Returns None if a value has
        no such argument, or if the block returns or reads different things in the two calls.
        """
        nothing = frozenset({""})
        if dataclasses.replace(self, returns=()) != dataclasses.replace(other, returns=()):
            return None
        if len(self.returns) != len(other.returns):
            return None
        both = [(one or nothing) & (two or nothing) for one, two in zip(self.returns, other.returns, strict=True)]
        return OwnBlock(self.name, tuple(map(min, both)), self.alone) if all(both) else None


Recorded = tuple[list[list[RecordedBlock]], dict[str, str]]
"""The blocks of each call in order, and a list of blocks -> why its blocks cannot be left to other ranks."""


def recorded_blocks(model: nn.Module, lists: Mapping[str, Sequence[str]], calls: Sequence[Call]) -> Recorded:
    """Record what the blocks of these lists do in `calls`: two calls of different sizes."""
    odd: dict[str, str] = {}
    orders: list[list[RecordedBlock]] = []
    outputs: list[tuple[str, Any]] = []  # (block, tensor that it has returned), to keep the tensors alive

    def note(name: str, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Forward hook of a block. If a value has the shape and dtype of no argument, the reason is stored for the list."""
        given, own_list = by_place(args, kwargs), name.rpartition(".")[0]
        of_block = {id(value): other for other, value in outputs}
        read = {of_block[id(value)] for value in given.values() if id(value) in of_block}
        returns: list[frozenset[str] | None] = []
        for value in (out,) if isinstance(out, torch.Tensor) else out:
            if value is None:
                returns.append(None)
                continue
            like = frozenset(place for place, each in given.items() if _alike(value, each))
            if not like:
                odd.setdefault(own_list, f"its block {name} returns a value whose shape matches none of its arguments")
                return
            returns.append(like)
            outputs.append((name, value))
        reads = frozenset(other for other in read if other.rpartition(".")[0] == own_list)
        orders[-1].append(RecordedBlock(name, tuple(returns), isinstance(out, torch.Tensor), reads))

    with ExitStack() as hooks:
        for name in itertools.chain.from_iterable(lists.values()):
            hook = functools.partial(note, name)
            hooks.enter_context(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        for call in calls:
            outputs.clear()
            orders.append([])
            call.run(model)
    return orders, odd


def _alike(a: Any, b: Any) -> bool:
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return tensors and (a.shape, a.dtype) == (b.shape, b.dtype)


def order_of(
    lists: Mapping[str, Sequence[str]], recorded: list[list[RecordedBlock]], odd: Mapping[str, str]
) -> list[OwnBlock]:
    """Return the blocks of these lists in the order of the calls. Raises Unproven if they cannot be shared out."""
    orders = []
    for each in recorded:
        orders.append([block for block in each if list_of(block) in lists and list_of(block) not in odd])
    names = [block.name for block in orders[0]]
    if len(set(names)) < len(names):
        raise Unproven("a block runs more than once in a call")
    ran = {name: blocks for name, blocks in lists.items() if blocks[0] in names}
    in_order = all([each for each in names if each in blocks] == list(blocks) for blocks in ran.values())
    if not in_order or len(names) != sum(map(len, ran.values())) or names != [block.name for block in orders[1]]:
        raise Unproven("its blocks do not run list by list")
    found: list[OwnBlock] = []
    until = last_readers(orders[0])
    for one, two in zip(*orders, strict=True):
        if (block := one.with_another(two)) is None:
            raise Unproven(
                f"its block {one.name} returns values whose shapes match none of its arguments in calls of two sizes"
            )
        found.append(dataclasses.replace(block, until=until.get(one.name, "")))
    if not found:
        raise Unproven(next(iter(odd.values()), NO_LIST))
    return found


def list_of(block: "OwnBlock | RecordedBlock") -> str:
    """Return the name of the list that contains a block."""
    return block.name.rpartition(".")[0]


def are_mixed(blocks: Sequence[OwnBlock]) -> bool:
    """Return whether blocks of one list run between blocks of another list."""
    lists = [name for name, _ in itertools.groupby(map(list_of, blocks))]
    return len(set(lists)) < len(lists)


def read_by_next(blocks: Sequence[OwnBlock], names: Collection[str]) -> list[OwnBlock]:
    """Return blocks of several lists in their order of execution. In the lists `names`, `until` is set to the list's next
    block if blocks of other lists run between the two.

    The class may add something to a block's output before the next block reads it. That sum is a new tensor, so
    `recorded_blocks` does not see that the next block reads the output.
    """
    found = []
    for number, block in enumerate(blocks):
        after = [each.name for each in blocks[number + 1 :] if list_of(each) == list_of(block)][:1]
        if list_of(block) in names and after and blocks[number + 1].name != after[0]:
            block = dataclasses.replace(block, until=after[0])
        found.append(block)
    return found


def last_readers(order: Sequence[RecordedBlock]) -> dict[str, str]:
    """Return block -> the last block that reads its output, for blocks that need OwnBlock.until."""
    following = {block.name: after.name for block, after in itertools.pairwise(order)}
    until = {name: block.name for block in order for name in block.reads}
    return {name: last for name, last in until.items() if following.get(name) != last}


def whole_list(tried: Sequence[OwnBlock], names: Sequence[str], like: Sequence[int]) -> list[OwnBlock]:
    """Return all blocks of a list with these names, each as a copy of its tried block (see Representatives)."""
    return [dataclasses.replace(tried[number], name=name) for number, name in zip(like, names, strict=True)]


def blocks_of_all(
    tried: Sequence[OwnBlock], lists: Mapping[str, Sequence[str]], like: Representatives
) -> tuple[OwnBlock, ...]:
    """Return all blocks of the tried lists, one list after the other."""
    found: list[OwnBlock] = []
    for at in dict.fromkeys(map(list_of, tried)):
        found += whole_list([block for block in tried if list_of(block) == at], lists[at], like[at])
    return tuple(found)


def tried_blocks(
    blocks: Sequence[OwnBlock], lists: Mapping[str, Sequence[str]], kept: Mapping[str, Sequence[str]], like: Representatives
) -> list[OwnBlock]:
    """Return those of a model's blocks that are tried, with the names that they have in its shorter lists (see
    `shortened`)."""
    names = {lists[at][like[at].index(number)]: name for at, of_list in kept.items() for number, name in enumerate(of_list)}
    return [dataclasses.replace(block, name=names[block.name]) for block in blocks if block.name in names]
