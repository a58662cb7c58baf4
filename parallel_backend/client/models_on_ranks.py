"""The models on ranks, and the order in which they make room for another model: the least recently used first."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallel_backend.core.setup import Setup
from parallel_backend.processes.pool_part import SomeRanks

from .remote_transformer import RemoteTransformer

MOST_MODELS = 8
"""Maximum number of models on ranks at a time: even a small model has threads, process groups and conditionings there."""


@dataclass
class OnRanks:
    """A model on ranks, and its last use."""

    setup: Setup
    model: RemoteTransformer
    owner: Any = None
    """The object that frees the weights. It is kept alive as long as the model."""
    used: int = 0
    """Number of the last use. Later uses of any model have larger numbers."""
    run: int = -1
    """Number of the sampling run of the last use. -1: the model has not been used."""
    again: bool = False
    """Whether the last use was not the first one in its run."""


class ModelsOnRanks:
    """The models by setup. Changed under the registry's lock, read without it."""

    def __init__(self):
        self.run = 0
        """Number of the present sampling run. The registry adds 1 when a run begins."""
        self._newest: OnRanks | None = None  # used last
        self._models: dict[Setup, OnRanks] = {}
        self._uses = itertools.count(1)

    def find(self, setup: Setup) -> OnRanks | None:
        """Return the model of `setup`, if it is on ranks that work."""
        each = self._models.get(setup)
        return each if each is not None and each.model.on_ranks else None

    def of(self, pool: SomeRanks) -> list[OnRanks]:
        """Return the models on the whole pool that these ranks belong to, the least recently used first."""
        return [each for each in self if each.model.pool.whole is pool.whole]

    def __iter__(self) -> Iterator[OnRanks]:
        """Return the models on ranks that work, the least recently used first."""
        present = [each for each in list(self._models.values()) if each.model.on_ranks]
        return iter(sorted(present, key=lambda each: each.used))

    def add(self, setup: Setup, model: RemoteTransformer) -> OnRanks:
        """Add a model that has been loaded. Models whose ranks have failed are dropped."""
        for gone in [other for other, each in self._models.items() if not each.model.on_ranks]:
            del self._models[gone]
        self._models[setup] = added = OnRanks(setup, model)
        return added

    def use(self, used: OnRanks, owner: Any) -> None:
        """Record a use of the model by `owner`."""
        self._newest, used.owner, used.used = used, owner, next(self._uses)
        used.again, used.run = used.run == self.run, self.run

    def use_again(self, model: RemoteTransformer) -> bool:
        """Record a use of the model, if it was the last one used and is on ranks that work. Returns whether it is: then
        Registry.model would return it again in the same prompt."""
        newest = self._newest
        if newest is None or newest.model is not model or not model.on_ranks:
            return False
        newest.again, newest.run = newest.run == self.run, self.run
        return True

    def remove(self, gone: OnRanks) -> None:
        self._models.pop(gone.setup, None)
        self._newest = None

    def clear(self) -> None:
        self._models.clear()
        self._newest = None

    def that_give_way_to(self, setup: Setup, pool: SomeRanks) -> list[OnRanks]:
        """Return the models on `pool` that may be asked for memory for the model of `setup`, in this order.

        If two models take turns within a run, each takes memory from the other only at its first use: moving weights at each
        step would cost more than streaming them.
        """
        asks = self._models.get(setup)
        others = [each for each in self.of(pool) if each.setup != setup]
        return [each for each in others if asks is None or not asks.again or each.run != self.run]
