"""Moves the weights of one model between the ranks' devices and host memory. It frees memory for other programs, models and
LoRAs, one block after the other, until there is enough. The next run brings back those that fit (MemoryGuard)."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace

from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.placement.residency import ALL
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.wire.loading import Loaded, Residency, SetResident


class ResidentWeights:
    """Where the weights of a model on `ranks` are. `weights`: each rank's, by the file's header. Thread-safe.

    `limits`: most bytes of weights on each rank's device, as in the last SetResident; ALL: no limit. `parked`: whether a
    rank lacks weights that it needs even if it streams as many as possible. `wanted`: bytes that would be on each device if
    no other model needed the memory.
    """

    def __init__(
        self,
        ranks: ModelRanks,
        weights: Sequence[RankWeights],
        limits: Sequence[int] | None = None,
        lock: AbstractContextManager | None = None,
    ):
        """`limits`: those of Load. None: no limit. `lock`: the lock under which micro-steps are sent, so that none follows a
        message that takes its weights away."""
        self._ranks, self._lock, self.weights = ranks, lock or threading.RLock(), weights
        self._limit((ALL,) * len(weights) if limits is None else tuple(limits))
        self.wanted = tuple(self.expected())
        self._held = [Residency(rank, 0, 0) for rank in range(len(weights))]

    @property
    def for_loading(self) -> tuple[int, ...]:
        """The limits as Load.resident has them."""
        return () if all(limit == ALL for limit in self.limits) else self.limits

    def loaded(self, replies: Sequence[Loaded]) -> None:
        """Record that the model is loaded. `replies`: in rank order."""
        self._held = [Residency(reply.rank, reply.weight_bytes, reply.host_bytes) for reply in replies]
        self.wanted = self.device_bytes

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes of weights on each rank's device."""
        return tuple(held.device_bytes for held in self._held)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Bytes of each rank's weights in host memory."""
        return tuple(held.host_bytes for held in self._held)

    def _limit(self, limits: tuple[int, ...]) -> None:
        self.limits, self.parked = limits, 0 in limits

    def expected(self, limits: Sequence[int] | None = None) -> list[int]:
        """Bytes of weights on each rank's device under `limits`, by the file's header. None: under the present limits."""
        by_rank = zip(self.weights, self.limits if limits is None else limits, strict=True)
        return [weights.on_device(limit) if limit else 0 for weights, limit in by_rank]

    def tell(self, limits: Sequence[int]) -> Future | None:
        """Limit the bytes of weights on each rank's device, see loading.SetResident. Does not wait: ranks move weights
        before they handle later messages. None: nothing changes."""
        with self._lock:
            if tuple(limits) == self.limits:
                return None
            future = self._ranks.ask(SetResident(tuple(limits)), Residency)
            self._limit(tuple(limits))
            future.add_done_callback(self._note)
            return future

    def give_way(self, ranks: Sequence[int], nbytes: float, whole: bool, working: bool) -> int:
        """Free `nbytes` on `ranks`, all on one device, each in proportion to its bytes. Returns the bytes that become free.

        Does not wait, see `tell`. `whole`: weights may not be streamed, so all weights of a rank leave. `working`: this
        model is used again while the other one has the memory, so each rank keeps the least that it needs to compute.
        """
        before = self.expected()
        held = sum(before[rank] for rank in ranks)
        share = min(1.0, nbytes / held) if held else 0.0
        limits = list(self.limits)
        for rank in ranks:
            wanted, least = before[rank] - math.ceil(before[rank] * share), self.weights[rank].least
            if before[rank]:
                limits[rank] = 0 if whole else wanted if wanted >= least else least if working else 0
        self.tell(limits)
        after = self.expected()
        return sum(before[rank] - after[rank] for rank in ranks)

    def wake(self) -> None:
        """Bring the weights that ranks need to compute to their devices, before they handle later messages."""
        if self.parked:
            self.tell([max(limit, one.least) for one, limit in zip(self.weights, self.limits, strict=True)])

    def adapted(self, answered: Future) -> None:
        """Record each rank's bytes of host memory after additions to the weights (LoRA) were added or freed. `answered`: the
        ranks' replies, see Adapted. To be called in the order of the replies."""
        if answered.exception() is None:
            in_host = zip(self._held, answered.result(), strict=True)
            self._held = [replace(held, host_bytes=reply.host_bytes) for held, reply in in_host]

    def _note(self, answered: Future) -> None:
        """Record where the weights are. An error is raised to the next caller that asks the ranks."""
        if answered.exception() is None:
            self._held = answered.result()
