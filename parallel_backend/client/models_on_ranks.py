"""The models on ranks, and the memory that they give to each other and to other programs.

They leave the devices for host memory, or altogether, the least recently used first.
"""

import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.core.devices import device_kind
from parallel_backend.core.host_memory import room_for_weights
from parallel_backend.core.setup import Setup
from parallel_backend.processes.pool import RankError
from parallel_backend.processes.pool_part import SomeRanks

from .memory_guard import MakeRoom
from .remote_transformer import RemoteTransformer

log = logging.getLogger(__name__)

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
    """The models by setup. Changed under the registry's `lock`, read without it."""

    def __init__(self, lock: AbstractContextManager):
        self._lock = lock
        self.run = 0
        """Number of the present sampling run. The registry adds 1 when a run begins."""
        self._newest: OnRanks | None = None  # used last
        self._models: dict[Setup, OnRanks] = {}
        self._uses = itertools.count(1)
        self._former_owners: list[Any] = []  # kept alive: the owner may be what calls `let_go`, and must outlive that call

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
        """Note a use of the model by `owner`."""
        self._former_owners.clear()
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

    def let_go(self, gone: OnRanks) -> Future | None:
        """Have the ranks free the memory of this model. The future ends when it is free. None: the ranks have failed."""
        self._models.pop(gone.setup, None)
        self._newest = None
        self._former_owners.append(gone.owner)
        try:
            return gone.model.unload()
        except RankError:
            return None

    def clear(self) -> None:
        self._models.clear()
        self._newest = None

    def bytes_on(self, setup: Setup, device: str) -> int:
        """Return the bytes of the model of `setup` on one device ('cuda:0'). 0 if it is not loaded. Never waits."""
        return 0 if (entry := self.find(setup)) is None else entry.model.bytes_on(device)

    def wanted_on(self, setup: Setup, device: str) -> int | None:
        """Like `bytes_on`, but as if no other model needed the memory. None: the model is not loaded."""
        return None if (entry := self.find(setup)) is None else entry.model.wanted_on(device)

    def held_on(self, pool: SomeRanks, device: str) -> int:
        """Return the bytes of the models on these ranks on one device."""
        return sum(each.model.bytes_on(device) for each in self.of(pool))

    def give_back(self, setup: Setup, device: str, nbytes: float) -> int:
        """Free `nbytes` of `device` by moving the model of `setup`, see RemoteTransformer.give_way. Return the bytes that
        came free. The model stays on the ranks. Waits for micro-steps in progress."""
        with self._lock:
            if (entry := self.find(setup)) is None:
                return 0
            try:
                return entry.model.give_way(device, nbytes, lambda: None)
            except RankError as error:  # the ranks' memory is free, but is not counted
                log.warning("%s", str(error))
                return 0

    def make_way(self, pool: SomeRanks, device: str, nbytes: int) -> int:
        """Free `nbytes` of one device by moving the models on these ranks, without waiting. Return the bytes that become
        free."""
        with self._lock:
            return self._make_way(self.of(pool), device, nbytes)

    def make_room(self, setup: Setup, pool: SomeRanks, make_room: MakeRoom, device: str, missing: int) -> int:
        """A MakeRoom for the model of `setup`: calls `make_room` for GPUs, then frees memory of other models on `pool`."""
        freed = make_room(device, missing) if device_kind(device) == "cuda" else 0
        with self._lock:
            models, asking = self._that_give_way_to(setup, pool), self.find(setup)
            return freed + self._make_way(models, device, missing - freed, asking, in_turns=True)

    def _that_give_way_to(self, setup: Setup, pool: SomeRanks) -> list[OnRanks]:
        """Return the models on `pool` that may be asked for memory for the model of `setup`, in this order.

        If two models take turns within a run, each takes memory from the other only at its first use: moving weights at each
        step would cost more than streaming them.
        """
        asks = self._models.get(setup)
        others = [each for each in self.of(pool) if each.setup != setup]
        return [each for each in others if asks is None or not asks.again or each.run != self.run]

    def _make_way(
        self, models: list[OnRanks], device: str, nbytes: int, asking: OnRanks | None = None, in_turns: bool = False
    ) -> int:
        """Like `make_way`, with these models in this order. `asking`: the model that needs the memory, if it is on ranks.
        `in_turns`: models that are used in turns with the new one in this run keep the minimum that they need."""
        freed = 0
        for each in models:
            held, wanted = each.model.bytes_on(device), nbytes - freed
            if wanted <= 0:
                break
            if not held:
                continue
            working = in_turns and each.run == self.run
            to_host = min(held, wanted, each.model.host_lacks)
            has_room = self._host_has_room(device_kind(device), to_host, asking)
            moved = each.model.make_way(device, wanted, working) if has_room else None
            if moved is None:
                self.let_go(each)
                moved = held
            freed += moved
        return freed

    def _host_has_room(self, kind: str, nbytes: int, asking: OnRanks | None) -> bool:
        """Return whether `nbytes` of weights from ranks on this kind of device fit into host memory. To make room, models
        that are only in host memory are unloaded, the least recently used first, except `asking`, which is about to come
        back."""
        if not nbytes:
            return True
        free = room_for_weights(torch.device(kind))
        for each in self:
            if free < nbytes and each.model.is_parked and each is not asking:
                free += sum(each.model.resident.host_bytes)
                self.let_go(each)
        return free >= nbytes
