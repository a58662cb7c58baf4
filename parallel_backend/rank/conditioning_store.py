"""Conditioning that a rank holds for one of its models."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.block_changes import UNCHANGED, BlockChanges
from parallel_backend.core.device_copies import to_device
from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder
from parallel_backend.families.own_class.family import OwnClassFamily
from parallel_backend.wire.sampling import PutConditioning, Step


@dataclass(frozen=True)
class RankConditioning:
    """Contents of a PutConditioning message; `tensors` are on the rank's device."""

    grid: tuple[int, ...]
    token_order: TokenOrder
    batch: int
    tensors: dict[str, torch.Tensor]
    companion_tokens: int = 0
    changes: BlockChanges = UNCHANGED
    kept: defaultdict[Span, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))  # see StepInputs

    @property
    def made(self) -> int:
        """Number of values in `kept`."""
        return sum(len(kept) for kept in self.kept.values())

    def is_whole(self, step: Step) -> bool:
        """Whether the micro-step computes all image tokens, rather than a band."""
        return step.tokens == self.token_order.span


class ConditioningStore:
    """Conditioning by the client's id."""

    def __init__(self, family: OwnClassFamily, device: torch.device):
        self._family, self._device = family, device
        self._held: dict[int, RankConditioning] = {}

    def __getitem__(self, conditioning: int) -> RankConditioning:
        return self._held[conditioning]

    @property
    def nbytes(self) -> int:
        """Of all conditionings' tensors."""
        return sum(tensor.nbytes for held in self._held.values() for tensor in held.tensors.values())

    def put(self, message: PutConditioning) -> None:
        self._held[message.id] = RankConditioning(
            message.grid,
            self._family.token_order(message.grid, message.references, message.along),
            message.batch,
            {name: to_device(tensor, self._device) for name, tensor in message.tensors.items()},
            message.companion_tokens,
            message.changes,
        )

    def drop(self, conditioning: int) -> None:
        self._held.pop(conditioning, None)
