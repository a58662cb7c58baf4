"""Finds out which blocks a class skips if other nodes have them return their arguments (skip layer guidance), and tries
whether ranks whose blocks return what they get give the same.

Such a node replaces a block by a function, which the class calls in place of it. No function reaches the ranks: they call
the class as ever, and a skipped block passes its arguments on.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.calls.residuals import BLOCKS, REPLACED
from parallel_backend.own_class.calls.tried_calls import Call
from parallel_backend.own_class.cuts.stages import passing_through
from parallel_backend.own_class.trials.call_state import held
from parallel_backend.own_class.trials.change_trial import ChangeTrial, Shown
from parallel_backend.own_class.trials.comparison import difference
from parallel_backend.own_class.trials.other_calls import is_proven
from parallel_backend.own_class.trials.token_learning import bare

Key = tuple[str, int]
"""(kind of the block, its number), as other nodes name it."""


class TrialOfSkips(ChangeTrial):
    """Of skipped blocks. `kinds`: of the blocks, by the names that other nodes give them."""

    fails = "it does not run with skipped blocks"

    def __init__(self, *given: Any, kinds: Sequence[str], **named: Any):
        super().__init__(*given, **named)
        self._kinds = kinds

    def shown(self) -> Shown:
        why = adapter_of(self.own.kind).unskipped
        return Shown(why) if why else super().shown()

    def tried(self) -> Shown:
        model, kept, calls = self.short.model, self.short.kept, self.calls
        before = held(model)
        lists: dict[str, str] = {}
        for kind, numbers in self._asked_for(calls[0]).items():
            names = [self._skipped_block(calls[0], (kind, number)) for number in numbers]
            own = next((at for at, of_list in kept.items() if list(of_list) == names), None)
            if own is None or numbers != list(range(len(names))):
                return Shown(f"the blocks that it skips are not a list in its order ({kind})")
            if not {block.name for block in self.blocks}.issuperset(names):
                return Shown(f"its blocks in {own} are not shared out")
            lists[kind] = own
        keys = [(kind, number) for kind, at in lists.items() for number in range(len(kept[at]))]
        for together in (*([key] for key in keys), keys):
            names = [kept[lists[kind]][number] for kind, number in together]
            if why := self._why_not_passed(names, [(call, _with_skipped(call, together)) for call in calls]):
                return Shown(why)
        if held(model) != before:
            return Shown("it keeps something from a call with skipped blocks")
        return Shown(lists=lists)

    def _asked_for(self, call: Call) -> dict[str, list[int]]:
        """Kind -> numbers of the replaced blocks that the class calls, for kinds of which it calls any."""
        asked: dict[str, list[int]] = {}

        def note(kind: str, number: int, args: Any, more: Mapping[str, Any]) -> Any:
            asked.setdefault(kind, []).append(number)
            return more["original_block"](args)

        most = sum(map(len, self.short.kept.values()))
        keys = [(kind, number) for kind in self._kinds for number in range(most)]
        _replaced(call, {key: partial(note, *key) for key in keys}).run(self.short.model)
        return asked

    def _skipped_block(self, call: Call, key: Key) -> str:
        """The one block that runs without `key` and not with it. Empty: there is no such block."""
        skipping = self._ran(_with_skipped(call, [key]))
        missing = [name for name in self._ran(call) if name not in skipping]
        return missing[0] if len(missing) == 1 else ""

    def _ran(self, call: Call) -> list[str]:
        """Names of the blocks that run in the call."""
        ran: list[str] = []
        with ExitStack() as hooks:
            for name in (name for of_list in self.short.kept.values() for name in of_list):
                block = self.short.model.get_submodule(name)
                hooks.enter_context(block.register_forward_pre_hook(lambda *_, name=name: ran.append(name)))
            call.run(self.short.model)
        return ran

    def _why_not_passed(self, names: Sequence[str], calls: Sequence[tuple[Call, Call]]) -> str:
        """Why ranks on which these blocks pass their arguments on are not right. Empty: they are.

        `calls`: each without and with skipped blocks."""
        model, actual = self.short.model, self.short.actual
        wholes = [(call, skipping.run(model)) for call, skipping in calls]
        passed = [block for block in self.blocks if block.name in names]
        cut = [replace(block, attention=()) if block in passed else block for block in self.blocks]
        with passing_through(model, passed):
            for number, (call, whole) in enumerate(wholes):
                out = call.run(model, options=False)
                if why := difference("blocks that return their arguments give another result", out, whole):
                    return why
                are_cut = not number and not self.proof.sequence  # once: it takes long
                tried = self.proof, cut if are_cut else bare(self.blocks)
                tokens = self.calls_of_tokens(actual) if are_cut else []
                if not is_proven(model, tried, (call, whole), actual, None, tokens):
                    return "ranks give another result with a skipped block"
        return ""


def _with_skipped(call: Call, keys: Sequence[Key]) -> Call:
    return _replaced(call, dict.fromkeys(keys, lambda args, _more: args))


def _replaced(call: Call, functions: Mapping[Key, Any]) -> Call:
    """The call with functions in place of blocks."""
    return replace(call, options={**call.options, REPLACED: {BLOCKS: dict(functions)}})
