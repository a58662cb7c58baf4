"""Plans as the JSON that ships (own_class/plans/plan.py), made from a trial's proof."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.own_class.plans.block_order import are_mixed, list_of
from parallel_backend.own_class.plans.plan import ListPlan


def lists_of(blocks: Sequence[OwnBlock]) -> tuple[ListPlan, ...]:
    """The ListPlans of a model with these blocks."""
    found: dict[str, list[OwnBlock]] = {}
    behind: dict[str, list[int]] = {}
    mixed = are_mixed(blocks)
    for block in blocks:
        of_list = found.setdefault(list_of(block), [])
        of_list.append(dataclasses.replace(block, name="", until="" if mixed else block.until))
        behind.setdefault(list_of(block), []).append(len(found[list_of(blocks[0])]) - 1)
    read = {list_of(block) for block in blocks if block.until} if mixed else set()
    lists = []
    for number, (name, of_list) in enumerate(found.items()):
        starts = [0, *(at for at in range(1, len(of_list) - 1) if at == 1 or of_list[at] != of_list[at - 1])]
        kinds = *(of_list[at] for at in starts), of_list[-1]
        shared = {(each.cuts, each.divided) for each in kinds}
        cuts, divided = shared.pop() if len(shared) == 1 else ((), ())
        if cuts or divided:
            kinds = tuple(dataclasses.replace(each, cuts=(), divided=()) for each in kinds)
        told = tuple(starts) if len(starts) > 2 else ()
        of_first = tuple(behind[name]) if mixed and number else ()
        kinds = kinds[:1] if len(set(kinds)) == 1 else kinds
        lists.append(ListPlan(name, kinds, cuts, divided, told, of_first, name in read))
    return tuple(lists)


def to_json(value: Any) -> Any:
    """A dataclass, and those in it, as dictionaries without fields that have their default."""
    if dataclasses.is_dataclass(value):
        fields = {each.name: (getattr(value, each.name), each.default) for each in dataclasses.fields(value)}
        return {name: to_json(one) for name, (one, default) in fields.items() if one != default}
    return [to_json(each) for each in value] if isinstance(value, tuple) else value
