"""The conditioning that a rank stores for one of its models."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.own_class.built.built_class import BuiltClass
from parallel_backend.wire.sampling import PutConditioning, Step

from .attention.words import WordKeys


@dataclass(frozen=True)
class RankConditioning:
    """The contents of a PutConditioning message. `tensors` are on the rank's device."""

    grid: tuple[int, ...]
    token_order: TokenOrder
    batch: int
    tensors: dict[str, torch.Tensor]
    words: WordKeys | None
    """Stored keys of the text for calls outside of runs; a run has them in its K/V buffer. None: every call computes the
    text."""
    companion_tokens: int = 0
    changes: BlockChanges = UNCHANGED
    kept: defaultdict[Hashable, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))
    """The rank's image tokens -> values that all micro-steps with these tokens share. With more facts of a micro-step in the
    key, the value is TokenCut.known."""
    forms: dict[tuple[Span, Span], Any] = field(default_factory=dict)
    """(tokens, batch entries) of a micro-step -> its stage_forward.StepForm."""

    @property
    def made(self) -> int:
        """Number of values in `kept` and of layers in `words`."""
        return sum(len(kept) for kept in self.kept.values()) + (0 if self.words is None else len(self.words.layers))

    def is_whole(self, step: Step) -> bool:
        """Whether the micro-step computes all image tokens, not only a band."""
        return step.tokens == self.token_order.span


class ConditioningStore:
    """Stores conditionings by the client's id."""

    def __init__(self, built: BuiltClass, device: torch.device, keeps_words: bool):
        """`keeps_words`: store the text's keys and values. This has an effect only if they are equal in all calls
        (OwnLatent.steady)."""
        self._built, self._device, self._keeps_words = built, device, keeps_words and built.own.steady
        self._held: dict[int, RankConditioning] = {}

    def __getitem__(self, conditioning: int) -> RankConditioning:
        return self._held[conditioning]

    @property
    def nbytes(self) -> int:
        """Bytes of all conditionings' tensors, and of the keys and values stored with them."""
        tensors = sum(tensor.nbytes for held in self._held.values() for tensor in held.tensors.values())
        return tensors + sum(words.nbytes for words in self._words())

    def put(self, message: PutConditioning) -> None:
        self._held[message.id] = RankConditioning(
            message.grid,
            self._built.token_order(message.grid, message.references, message.along),
            message.batch,
            {name: to_device(tensor, self._device) for name, tensor in message.tensors.items()},
            WordKeys(message.batch) if self._keeps_words and message.changes.guidance is None else None,
            message.companion_tokens,
            message.changes,
        )

    def forget_words(self) -> None:
        """Drop all stored keys and values of text."""
        for words in self._words():
            words.layers.clear()

    def _words(self) -> list[WordKeys]:
        return [held.words for held in self._held.values() if held.words is not None]

    def drop(self, conditioning: int) -> None:
        self._held.pop(conditioning, None)
