"""Trials of changes inside a class that other nodes ask for, on a model as the class's own trial has it (trial.py).

Here are what all of them share, and the trial of skipped blocks (skip layer guidance). guided_trial.py has the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.adapters.adapters import adapter_of
from parallel_backend.own_class.calls.residuals import BLOCKS, REPLACED
from parallel_backend.own_class.calls.tried_calls import Call, drawn, smaller, with_tensors_told
from parallel_backend.own_class.calls.unproven import first_line
from parallel_backend.own_class.cuts.stages import pass_through
from parallel_backend.own_class.plans.block_order import tried_blocks
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.call_state import module_state
from parallel_backend.own_class.trials.comparison import difference
from parallel_backend.own_class.trials.narrow import narrow_unet, narrowed, widened
from parallel_backend.own_class.trials.other_calls import is_proven
from parallel_backend.own_class.trials.short_model import Short, short_model
from parallel_backend.own_class.trials.token_learning import without_token_cut
from parallel_backend.own_class.trials.token_trial import Runs
from parallel_backend.own_class.trials.trial import conditions_of_trial


@dataclass(frozen=True)
class Shown:
    """Result of a trial of a change."""

    why: str = ""
    """Why it is not proven. Empty: it is."""
    has_effect: bool = False
    """For guidance: whether the class calls the function that guides its attention."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """Of skipped blocks: kind of blocks -> the list that has them by their numbers. Kinds that are missing have no effect:
    the class does not ask for them."""


class ChangeTrial(ABC):
    """The trial of a change for calls like `call`, at the `times` too. `proof`: of those calls without the change. `tensor`:
    ranks that share layers. `poll`: as in `trial`."""

    fails: str
    """Beginning of the refusal of a class that raises an error."""

    def __init__(
        self,
        own: OwnClass,
        proof: Proof,
        call: Call,
        times: Sequence[float],
        tensor: int = 1,
        poll: Callable[[float], None] = lambda _: None,
    ):
        self.own, self.proof, self.times, self.tensor, self._poll = own, proof, times, tensor, poll
        self._call = with_tensors_told(call) if proof.options else call
        self.short: Short
        """The tried model."""
        self.blocks: list[OwnBlock]
        """The blocks of the tried model that ranks share."""

    @abstractmethod
    def tried(self) -> Shown:
        """The result with the tried model."""

    def shown(self) -> Shown:
        """The result with a narrower model, or else with one of the class's own width."""
        own, found = self.own, Shown(NOT_TRIED)
        narrower = () if own.unet else narrowed(own, self._call, self.tensor)
        with conditions_of_trial(self._poll) as poll:
            for kind, call, factor in (*narrower, (narrow_unet(own) if own.unet else own, self._call, 1)):
                poll.begin(0, 1)
                try:
                    self.short = short_model(kind, call, poll)
                    blocks = tried_blocks(self.proof.blocks, self.short.lists, self.short.kept, self.short.like)
                    self.blocks = widened(blocks, Fraction(1, factor))
                    runs = Runs(self.short.model, self.blocks)
                    self._sizes = () if self.proof.sequence else runs.sizes(self.short.actual)
                    found = self.tried()
                except Exception as error:  # of any kind: its code is not known, and may count on its own widths
                    found = Shown(f"{self.fails} ({first_line(error)})")
                if not found.why:
                    return found
        return found

    @property
    def calls(self) -> list[Call]:
        """Calls of the tried model, at no time and at the trial's times."""
        return [drawn(self.short.call, 1), *(drawn(self.short.call, 3, time) for time in self.times)]

    def calls_of_tokens(self, actual: Call, time: Sequence[float] = ()) -> list[Call]:
        """Calls like `actual` with which cut tokens are tried, at one time if it is given."""
        return [drawn(smaller(actual, *size), 1, *time) for size in self._sizes]


Key = tuple[str, int]
"""(kind of the block, its number), as other nodes name it."""


class TrialOfSkips(ChangeTrial):
    """The trial of blocks that return their arguments. It finds out which blocks those are, and whether ranks that skip them
    give the same result. `kinds`: of the blocks, by the names that other nodes give them.

    Such a node replaces a block by a function, which the class calls in place of it. No function reaches the ranks: they
    call the class as ever, and a skipped block passes its arguments on.
    """

    fails = "it does not run with skipped blocks"

    def __init__(self, *given: Any, kinds: Sequence[str], **named: Any):
        super().__init__(*given, **named)
        self._kinds = kinds

    def shown(self) -> Shown:
        why = adapter_of(self.own.kind).unskipped
        return Shown(why) if why else super().shown()

    def tried(self) -> Shown:
        model, kept, calls = self.short.model, self.short.kept, self.calls
        before = module_state(model)
        lists: dict[str, str] = {}
        for kind, numbers in self._asked_for(calls[0]).items():
            names = [self._skipped_block(calls[0], (kind, number)) for number in numbers]
            own = next((at for at, of_list in kept.items() if list(of_list) == names), None)
            if own is None or numbers != list(range(len(names))):
                return Shown(f"the skipped blocks are not one list of blocks in order ({kind})")
            if not {block.name for block in self.blocks}.issuperset(names):
                return Shown(f"its blocks in {own} are not shared out")
            lists[kind] = own
        keys = [(kind, number) for kind, at in lists.items() for number in range(len(kept[at]))]
        for together in (*([key] for key in keys), keys):
            names = [kept[lists[kind]][number] for kind, number in together]
            if why := self._why_not_passed(names, [(call, _with_skipped(call, together)) for call in calls]):
                return Shown(why)
        if module_state(model) != before:
            return Shown("a call with skipped blocks changes later calls")
        return Shown(lists=lists)

    def _asked_for(self, call: Call) -> dict[str, list[int]]:
        """Kind -> numbers of the replacements that the class calls. Kinds without any are left out."""
        asked: dict[str, list[int]] = {}

        def note(kind: str, number: int, args: Any, more: Mapping[str, Any]) -> Any:
            asked.setdefault(kind, []).append(number)
            return more["original_block"](args)

        most = sum(map(len, self.short.kept.values()))
        keys = [(kind, number) for kind in self._kinds for number in range(most)]
        _replaced(call, {key: partial(note, *key) for key in keys}).run(self.short.model)
        return asked

    def _skipped_block(self, call: Call, key: Key) -> str:
        """Name of the block that does not run if `key` is replaced. Empty: none, or several."""
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
        """Why ranks whose blocks `names` return their arguments give a different result. Empty: they do not.

        `calls`: each without and with skipped blocks."""
        model, actual = self.short.model, self.short.actual
        wholes = [(call, skipping.run(model)) for call, skipping in calls]
        passed = [block for block in self.blocks if block.name in names]
        cut = [replace(block, attention=()) if block in passed else block for block in self.blocks]
        with pass_through(model, passed):
            for number, (call, whole) in enumerate(wholes):
                out = call.run(model, options=False)
                if why := difference("blocks that return their arguments give a different result", out, whole):
                    return why
                are_cut = not number and not self.proof.sequence  # once: it takes long
                tried = self.proof, cut if are_cut else without_token_cut(self.blocks)
                tokens = self.calls_of_tokens(actual) if are_cut else []
                if not is_proven(model, tried, (call, whole), actual, None, tokens):
                    return "ranks give a different result with a skipped block"
        return ""


def _with_skipped(call: Call, keys: Sequence[Key]) -> Call:
    return _replaced(call, dict.fromkeys(keys, lambda args, _more: args))


def _replaced(call: Call, functions: Mapping[Key, Any]) -> Call:
    """The call with functions in place of blocks."""
    return replace(call, options={**call.options, REPLACED: {BLOCKS: dict(functions)}})
