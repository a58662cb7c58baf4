"""Conditioning that a rank holds for one of its models."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families import Family
from parallel_backend.families.base.step_inputs import TEXT_ENDS
from parallel_backend.wire.sampling import PutConditioning, Step

from .attention.prefix_keys import PrefixKeys
from .attention.text_runs import TextRun, text_runs


@dataclass(frozen=True)
class RankConditioning:
    """Contents of a PutConditioning message; `tensors` are on the rank's device, in the compute dtype."""

    grid: tuple[int, ...]
    token_order: TokenOrder
    text_tokens: int
    batch: int
    tensors: dict[str, torch.Tensor]
    prefix: PrefixKeys
    """Of calls outside of runs; those of a run are in its K/V buffer."""
    companion_tokens: int = 0
    changes: BlockChanges = UNCHANGED
    text_runs: tuple[TextRun, ...] = ()
    """Of a text in layers over CAUSAL_TEXT, the same in all batch entries."""
    kept: defaultdict[Span, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))  # see StepInputs

    @property
    def made(self) -> int:
        """Number of values in `kept`, and of layers in `prefix`."""
        return sum(len(kept) for kept in self.kept.values()) + len(self.prefix.layers)

    def is_whole(self, step: Step) -> bool:
        """Whether the micro-step computes all image tokens, rather than a band."""
        return step.tokens == self.token_order.span


class ConditioningStore:
    """Conditioning by the client's id."""

    def __init__(self, family: Family, device: torch.device, dtype: torch.dtype):
        self._family, self._device, self._dtype = family, device, dtype
        self._held: dict[int, RankConditioning] = {}

    def __getitem__(self, conditioning: int) -> RankConditioning:
        return self._held[conditioning]

    @property
    def nbytes(self) -> int:
        """Of all conditionings' tensors, and of keys and values that are kept with them."""
        tensors = sum(tensor.nbytes for held in self._held.values() for tensor in held.tensors.values())
        return tensors + sum(held.prefix.nbytes for held in self._held.values())

    def put(self, message: PutConditioning) -> None:
        exact = message.tensors if self._family.inputs.keeps_dtypes else self._family.inputs.exact
        tensors = {
            name: to_device(tensor, self._device, self._dtype if tensor.is_floating_point() and name not in exact else None)
            for name, tensor in message.tensors.items()
        }
        ends = message.tensors.get(TEXT_ENDS) if message.batch else None  # a replica may have no entry of a call
        token_order = self._family.token_order(message.grid, message.references, message.along)
        self._held[message.id] = RankConditioning(
            message.grid,
            token_order,
            message.text_tokens,
            message.batch,
            tensors,
            PrefixKeys(message.batch, message.changes.kept_text),
            message.companion_tokens,
            message.changes,
            () if ends is None else text_runs(ends[0]),
        )

    def forget_prefixes(self) -> None:
        """Drop the keys and values of all texts."""
        for held in self._held.values():
            held.prefix.layers.clear()

    def drop(self, conditioning: int) -> None:
        self._held.pop(conditioning, None)
