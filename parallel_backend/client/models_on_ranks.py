"""The models that are on ranks, and which of them gives way to another one: the least recently used first."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.residency import ALLOWED, Offload
from parallel_backend.processes.pool import Pool

from .remote_transformer import RemoteTransformer

MOST_MODELS = 8
"""On ranks at a time. Each has threads, groups and prompts there, of whatever size its weights are."""


@dataclass(frozen=True)
class ModelKey:
    """Everything that a model is loaded with. Equal keys share the ranks and the weights on them."""

    path: Path
    dtype: str
    devices: tuple[str, ...]
    degrees: Degrees
    attention: str
    """The kernel, see core/attention_kernels.py."""
    stage_split: str = "auto"
    compile: bool = False
    transfer_dtype: str = "full"
    offload: Offload = ALLOWED
    """Whether weights may be streamed from host memory."""
    planned: str = ""
    """What the planner chose degrees and devices from. Empty: the user chose them."""
    cuda_graphs: bool = False

    def differs_by_plan_alone(self, other: "ModelKey") -> bool:
        """They are equal in all that the planner does not choose."""
        return replace(other, devices=self.devices, degrees=self.degrees) == self


@dataclass
class OnRanks:
    """A model on ranks."""

    key: ModelKey
    model: RemoteTransformer
    owner: Any = None
    """Kept alive with the model: the object that frees the weights must outlive them."""
    used: int = 0
    """Larger than that of all models used before."""
    run: int = -1
    """Number of the sampling run in which it was used last. -1: in none yet."""
    again: bool = False
    """That was not its first use in this run."""


class ModelsOnRanks:
    """By their keys. Changed under the registry's lock, read without."""

    def __init__(self):
        self.run = 0
        """Number of the sampling run; it is counted on when one begins."""
        self._models: dict[ModelKey, OnRanks] = {}
        self._uses = itertools.count(1)

    def find(self, key: ModelKey) -> OnRanks | None:
        """The model of `key`, if it is on ranks that work."""
        found = self._models.get(key)
        return found if found is not None and found.model.on_ranks else None

    def of(self, pool: Pool) -> list[OnRanks]:
        """The models on these ranks, the least recently used first."""
        return [each for each in self if each.model.pool is pool]

    def __iter__(self) -> Iterator[OnRanks]:
        """The models on ranks that work, the least recently used first."""
        present = [each for each in list(self._models.values()) if each.model.on_ranks]
        return iter(sorted(present, key=lambda each: each.used))

    def add(self, key: ModelKey, model: RemoteTransformer) -> OnRanks:
        """A model has come onto ranks."""
        for gone in [other for other, each in self._models.items() if not each.model.on_ranks]:
            del self._models[gone]
        self._models[key] = added = OnRanks(key, model)
        return added

    def use(self, found: OnRanks, owner: Any) -> None:
        """It is used now, by `owner`."""
        found.owner, found.used = owner, next(self._uses)
        found.again, found.run = found.run == self.run, self.run

    def remove(self, gone: OnRanks) -> None:
        self._models.pop(gone.key, None)

    def clear(self) -> None:
        self._models.clear()

    def that_give_way_to(self, key: ModelKey, pool: Pool) -> list[OnRanks]:
        """Models on `pool` that may be asked for room for the model of `key`, in this order.

        Where two models take turns within a run each takes from the other once, at its first use. Then both have what is
        left to them: to move weights at each step would cost more than to stream them.
        """
        asks = self._models.get(key)
        others = [each for each in self.of(pool) if each.key != key]
        return [each for each in others if asks is None or not asks.again or each.run != self.run]
