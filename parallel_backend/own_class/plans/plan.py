"""Plans that ship with the pack: results of trials of published models, so that their first load needs no trial. A file in
PLANS has the plans of one class for one version of its code. `scripts/make_plans.py` creates them."""

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from parallel_backend.core.kept_file import read_kept
from parallel_backend.core.own_class import ROOT, OwnBlock, OwnClass, OwnCut
from parallel_backend.own_class.plans.block_order import read_by_next, whole_list
from parallel_backend.own_class.plans.proof import Proof

PLANS = Path(__file__).parent
NAME = "plans"
"""Key of the list of plans in a file."""


@dataclass(frozen=True)
class Asked:
    """A call for which a proof is needed, and the degrees for which it is needed."""

    form: str
    """The form of the call's arguments, without numbers, `options`, batch and sizes: names and numbers of axes of
    tensors."""
    options: frozenset[str]
    """Names of entries of ComfyUI's transformer_options that ranks do not get."""
    times: tuple[float, ...]
    """The timesteps at which a proof is made, see nodes.model.call.own_calls.near."""
    entries: int
    """The number of entries of the batch."""
    numbers: Mapping[str, float]
    """The call's arguments that are plain numbers."""
    sequence: bool
    bands: bool
    tensor: int


@dataclass(frozen=True)
class ListPlan:
    """A list of blocks as a few records without names: its first block, those between, and its last. One record: all are
    equal.

    `starts`: for each of `blocks` except the last, the number of the first block that it describes; empty: 0 and 1. `cuts`,
    `divided`: fields of OwnBlock that are the same in all blocks. They are then empty in `blocks`.
    """

    name: str
    blocks: tuple[OwnBlock, ...]
    cuts: tuple[OwnCut, ...] = ()
    divided: tuple[tuple[str, str], ...] = ()
    starts: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    """If the list's blocks run between those of the first list: for each block, the number of the block of the first list
    after which it runs."""
    read: bool = False
    """Whether each block of the list reads the output of the previous one and others run between
    (block_order.read_by_next)."""

    def whole(self, names: Sequence[str]) -> list[OwnBlock]:
        """Return records of all blocks of a list with these names."""
        blocks = self.blocks
        if self.cuts or self.divided:
            blocks = tuple(dataclasses.replace(block, cuts=self.cuts, divided=self.divided) for block in blocks)
        last, starts = len(names) - 1, self.starts or (0, 1)[: len(blocks) - 1] or (0,)
        like = [bisect_right(starts, number) - 1 for number in range(last)]
        return whole_list(blocks, names, [*like, len(blocks) - 1])


@dataclass(frozen=True)
class Plan:
    """A proof, and the calls of a class for which it holds."""

    name: str
    """Name of the published model with which it was made."""
    kind: str
    """Name of the class in ComfyUI's supported_models."""
    arguments: str
    """JSON of the constructor's arguments that can matter, without `depths`."""
    depths: tuple[str, ...]
    """Names of arguments that are numbers of blocks. The plan is valid for any values of them."""
    form: str
    """For this field and the next two see Asked."""
    options: tuple[str, ...]
    times: tuple[float, ...]
    entries: tuple[int, ...]
    """Numbers of batch entries for which it holds. Empty: any number."""
    tensor: tuple[int, ...]
    """Degrees of tensor parallelism for which it holds. 1: no tensor parallelism."""
    numbers: tuple[tuple[str, float], ...]
    """The call's numbers. Numbers named in proof.numbers may have any value."""
    lists: tuple[ListPlan, ...]
    """The lists of blocks in the order in which a call runs them."""
    proof: Proof
    """The proof without its blocks."""

    def serves(self, kind: str, arguments: Mapping[str, Any], asked: Asked) -> bool:
        """Return whether the plan is valid for this call. `arguments`: the constructor's arguments that can matter."""
        numbers = {name: value for name, value in asked.numbers.items() if name not in self.proof.numbers}
        same = (self.kind, self.arguments) == (kind, without(arguments, self.depths))
        same = same and (self.form, self.times) == (asked.form, asked.times)
        fits = set(self.proof.options) <= asked.options <= set(self.options) and numbers.items() <= set(self.numbers)
        in_batch = not self.entries or asked.entries in self.entries
        in_sequence = not asked.sequence or not self.proof.sequence
        in_bands = not asked.bands or self.proof.latent is not None
        return same and fits and in_batch and in_sequence and in_bands and asked.tensor in self.tensor

    def whole(self, lists: Mapping[str, Sequence[str]]) -> Proof:
        """Return the proof for a model with these lists of blocks. Raises KeyError if a list is missing."""
        placed: list[tuple[int, int, OwnBlock]] = []
        for number, each in enumerate(self.lists):
            names = lists[each.name]
            if each.behind and len(each.behind) != len(names):
                raise KeyError(each.name)
            is_first = not number and any(other.behind for other in self.lists)
            at = each.behind or (range(len(names)) if is_first else [number] * len(names))
            placed += [(place, number, block) for place, block in zip(at, each.whole(names), strict=True)]
        blocks = [block for *_, block in sorted(placed, key=lambda place: place[:2])]
        if read := [each.name for each in self.lists if each.read]:
            blocks = read_by_next(blocks, read)
        return dataclasses.replace(self.proof, blocks=tuple(blocks))


def without(arguments: Mapping[str, Any], depths: Sequence[str]) -> str:
    """Return the JSON of a constructor's arguments without `depths`, with sorted names."""
    return json.dumps({name: value for name, value in arguments.items() if name not in depths}, sort_keys=True)


def key_of(own: OwnClass, code: str) -> dict[str, object]:
    """Return the key of a file of plans: the class, and the digest of the code of its modules."""
    return {"class": f"{own.module}.{own.name}", "code": code}


def path_of(own: OwnClass) -> Path:
    """Return the path of the file with the class's plans, which may not exist."""
    return PLANS / f"{own.module.removeprefix(ROOT)}.{own.name}.json"


def read_plans(own: OwnClass, code: str) -> list[Plan] | None:
    """Return the class's plans, or None if there is no file or it was made for other code. Raises one of
    kept_file.UNREADABLE for a damaged file."""
    content = read_kept(path_of(own), key_of(own, code), NAME)
    return None if content is None else [of_json(Plan, each) for each in content]


def of_json(hint: Any, value: Any) -> Any:
    """A dataclass of the type `hint` from a dictionary without fields that have their default, and those in it. TypeError or
    ValueError for a value of another form."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else of_json(next(each for each in arguments if each is not NoneType), value)
    if origin is tuple and type(value) is list:
        items = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(of_json(each, item) for each, item in zip(items, value, strict=True))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and type(value) is dict:
        fields = get_type_hints(hint)
        return hint(**{name: of_json(fields.get(name), item) for name, item in value.items()})
    if type(value) is not hint:
        raise TypeError(f"{value!r} is no {hint}")
    return value
