"""Tries a change inside a class that other nodes ask for, on a model as the class's own trial has it (trial.py)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parallel_backend.core.own_class import OwnBlock, OwnClass
from parallel_backend.own_class.calls.tried_calls import Call, drawn, smaller, with_tensors_told
from parallel_backend.own_class.calls.unproven import first_line
from parallel_backend.own_class.plans.block_order import tried_blocks
from parallel_backend.own_class.plans.proof import NOT_TRIED, Proof
from parallel_backend.own_class.trials.narrow import narrow_unet, narrowed, narrowed_blocks
from parallel_backend.own_class.trials.short_model import Short, short_model
from parallel_backend.own_class.trials.token_trial import Runs
from parallel_backend.own_class.trials.trial import conditions_of_trial


@dataclass(frozen=True)
class Shown:
    """What a change is shown to be."""

    why: str = ""
    """Why it is not proven. Empty: it is."""
    has_effect: bool = False
    """Of guidance: the class calls the function that guides its attention."""
    whole_heads: bool = False
    """Of guidance: see NormalizedGuidance."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """Of skipped blocks: kind of blocks -> the list that has them by their numbers. Kinds that are missing have no effect:
    the class does not ask for them."""


class ChangeTrial(ABC):
    """The trial of a change for calls like `call`, of which `proof` is, at the `times` too. `tensor` ranks share layers.

    `poll`: as in `trial`."""

    fails: str
    """What a class does that cannot be tried."""

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
        """Of the tried model, those that ranks share out."""

    @abstractmethod
    def tried(self) -> Shown:
        """What the change is shown to be by the tried model."""

    def shown(self) -> Shown:
        """What the change is shown to be, by a narrower model or else one of the class's own width."""
        own, found = self.own, Shown(NOT_TRIED)
        narrower = () if own.unet else narrowed(own, self._call, self.tensor)
        with conditions_of_trial(self._poll) as poll:
            for kind, call, factor in (*narrower, (narrow_unet(own) if own.unet else own, self._call, 1)):
                poll.begin(0, 1)
                try:
                    self.short = short_model(kind, call, poll)
                    blocks = tried_blocks(self.proof.blocks, self.short.lists, self.short.kept, self.short.like)
                    self.blocks = narrowed_blocks(blocks, factor)
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
        """Of the tried model: at no time and at the trial's times."""
        return [drawn(self.short.call, 1), *(drawn(self.short.call, 3, time) for time in self.times)]

    def calls_of_tokens(self, actual: Call, time: Sequence[float] = ()) -> list[Call]:
        """Calls like `actual` with which ranks' tokens are tried, at one time if it is given."""
        return [drawn(smaller(actual, *size), 1, *time) for size in self._sizes]
