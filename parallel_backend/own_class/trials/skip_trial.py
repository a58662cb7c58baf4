"""Finds out which blocks a class skips if other nodes have them return their arguments (skip layer guidance), and tries
whether ranks whose blocks return what they get give the same.

Such a node replaces a block by a function, which the class calls in place of it. No function reaches the ranks: they call
the class as ever, and a skipped block passes its arguments on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.calls.residuals import BLOCKS, REPLACED
from parallel_backend.own_class.calls.tried_calls import Call, distance, drawn, smaller
from parallel_backend.own_class.cuts.stages import passing_through
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.band_trial import bare
from parallel_backend.own_class.trials.call_state import held
from parallel_backend.own_class.trials.change_trial import trial_of_change
from parallel_backend.own_class.trials.other_calls import is_proven
from parallel_backend.own_class.trials.short_model import Short
from parallel_backend.own_class.trials.stage_trial import TOLERANCE
from parallel_backend.own_class.trials.token_trial import Runs

Key = tuple[str, int]
"""(kind of the block, its number), as other nodes name it."""


@dataclass(frozen=True)
class Skips:
    """What skipped blocks are shown to be."""

    lists: Mapping[str, str] = field(default_factory=dict)
    """Kind of blocks -> the list that has them by their numbers. Others have no effect: the class does not ask for them."""
    why: str = ""
    """Why they are not proven. Empty: they are."""


def trial_of_skips(
    own: OwnClass,
    proof: Proof,
    call: Call,
    times: Sequence[float],
    kinds: Sequence[str],
    poll: Callable[[float], None] = lambda _: None,
) -> Skips:
    """What skipped blocks are shown to be for calls like `call`, of which `proof` is. `kinds`: of the blocks, by the names
    that other nodes give them. `poll`: as in `trial`."""

    def tried(short: Short, blocks: Sequence[OwnBlock]) -> Skips:
        return _tried(short, blocks, proof, times, kinds)

    def failed(why: str) -> Skips:
        return Skips(why=f"it does not run with skipped blocks ({why})")

    if why := adapter_of(own.kind).unskipped:
        return Skips(why=why)
    return trial_of_change(own, proof, call, tried, failed, poll)


def _tried(short: Short, blocks: Sequence[OwnBlock], proof: Proof, times: Sequence[float], kinds: Sequence[str]) -> Skips:
    model, kept, call, actual = short.model, short.kept, short.call, short.actual
    calls = [drawn(call, 1), *(drawn(call, 3, time) for time in times)]
    before = held(model)
    lists: dict[str, str] = {}
    for kind, numbers in _asked_for(model, kept, calls[0], kinds).items():
        names = [_skipped_block(model, kept, calls[0], (kind, number)) for number in numbers]
        own = next((at for at, of_list in kept.items() if list(of_list) == names), None)
        if own is None or numbers != list(range(len(names))):
            return Skips(why=f"the blocks that it skips are not a list in its order ({kind})")
        if not {block.name for block in blocks}.issuperset(names):
            return Skips(why=f"its blocks in {own} are not shared out")
        lists[kind] = own
    each_alone = [[(kind, number)] for kind, at in lists.items() for number in range(len(kept[at]))]
    together = [key for keys in each_alone for key in keys]
    for keys in (*each_alone, together):
        names = [kept[lists[kind]][number] for kind, number in keys]
        if why := _why_not_passed(
            model, proof, blocks, names, [(each, _with_skipped(each, keys)) for each in calls], actual
        ):
            return Skips(why=why)
    if held(model) != before:
        return Skips(why="it keeps something from a call with skipped blocks")
    return Skips(lists)


def _asked_for(
    model: nn.Module, kept: Mapping[str, Sequence[str]], call: Call, kinds: Sequence[str]
) -> dict[str, list[int]]:
    """Kind -> numbers of the replaced blocks that the class calls, for kinds of which it calls any."""
    asked: dict[str, list[int]] = {}

    def note(kind: str, number: int, args: Any, more: Mapping[str, Any]) -> Any:
        asked.setdefault(kind, []).append(number)
        return more["original_block"](args)

    most = sum(map(len, kept.values()))
    keys = [(kind, number) for kind in kinds for number in range(most)]
    _replaced(call, {key: partial(note, *key) for key in keys}).run(model)
    return asked


def _skipped_block(model: nn.Module, kept: Mapping[str, Sequence[str]], call: Call, key: Key) -> str:
    """The one block that runs without `key` and not with it. Empty: there is no such block."""
    names = [name for of_list in kept.values() for name in of_list]
    missing = [name for name in _ran(model, names, call) if name not in _ran(model, names, _with_skipped(call, [key]))]
    return missing[0] if len(missing) == 1 else ""


def _ran(model: nn.Module, names: Sequence[str], call: Call) -> list[str]:
    ran: list[str] = []
    hooks = [model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name in names]
    try:
        call.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return ran


def _with_skipped(call: Call, keys: Sequence[Key]) -> Call:
    return _replaced(call, dict.fromkeys(keys, lambda args, _more: args))


def _replaced(call: Call, functions: Mapping[Key, Any]) -> Call:
    return replace(call, options={**call.options, REPLACED: {BLOCKS: dict(functions)}})


def _why_not_passed(
    model: nn.Module,
    proof: Proof,
    blocks: Sequence[OwnBlock],
    names: Sequence[str],
    calls: Sequence[tuple[Call, Call]],
    actual: Call,
) -> str:
    """Why ranks on which these blocks pass their arguments on are not right. Empty: they are.

    `calls`: each without and with skipped blocks."""
    wholes = [(call, skipping.run(model)) for call, skipping in calls]
    passed = [block for block in blocks if block.name in names]
    cut = [replace(block, attention=()) if block in passed else block for block in blocks]
    with passing_through(model, passed):
        for number, (call, whole) in enumerate(wholes):
            if not (far := distance(call.run(model, options=False), whole)) <= TOLERANCE:
                return f"blocks that return their arguments give another result (by {far:.1e} of the largest value)"
            in_parts = cut if not proof.sequence and not number else NOT_TRIED
            sizes = () if isinstance(in_parts, str) else Runs(model, bare(blocks)).sizes(actual)
            tokens = [drawn(smaller(actual, *size), 1) for size in sizes]
            if not is_proven(model, (proof, bare(blocks), in_parts), (call, whole), actual, None, tokens):
                return "ranks give another result with a skipped block"
    return ""
