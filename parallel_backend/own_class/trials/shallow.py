"""A class with fewer blocks by its own arguments: of mixed lists, since it counts which block of one comes behind which of
another."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.plans.block_order import DEPTH, FEWEST_BLOCKS
from parallel_backend.own_class.trials.narrow import numbers_of_class

MOST_BLOCKS = 16
"""Of all lists that are left."""


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


def likes_of_shallower(lists: Mapping[str, Sequence[str]], kept: Mapping[str, Sequence[str]]) -> dict[str, Sequence[int]]:
    """block_order.Likes of a model with the lists `kept`, of a class with `lists`."""
    return {
        name: [*(min(number, len(kept[name]) - 2) for number in range(len(blocks) - 1)), len(kept[name]) - 1]
        for name, blocks in lists.items()
    }
