"""The place of the weights of one model: on the ranks' devices, or in host memory."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace

from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.placement.residency import ALL
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire.loading import Loaded, Residency, SetResident


class ResidentWeights:
    """Limits, and weights on devices, of a model on `ranks`. `weights`: each rank's, by the file's header. Thread-safe.

    `limits`: by rank, most bytes of weights on its device, as in the last SetResident; ALL: no limit. `wanted`: bytes on the
    device as long as no other model needs the memory. `working`: see loading.SetResident.
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
        self.limits = (ALL,) * len(weights) if limits is None else tuple(limits)
        self.working = True
        self.wanted = tuple(self.expected())
        self._held = [Residency(rank, 0, 0) for rank in range(len(weights))]

    @property
    def for_loading(self) -> tuple[int, ...]:
        """Load.resident."""
        return () if all(limit == ALL for limit in self.limits) else self.limits

    def loaded(self, replies: Sequence[Loaded]) -> None:
        """The model is loaded. `replies`: in rank order."""
        self._held = [Residency(reply.rank, reply.weight_bytes, reply.host_bytes) for reply in replies]
        self.wanted = self.device_bytes

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes of weights on the device of each rank."""
        return tuple(held.device_bytes for held in self._held)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Bytes of weights of each rank in host memory."""
        return tuple(held.host_bytes for held in self._held)

    @property
    def parked(self) -> bool:
        """Whether a rank lacks weights that it needs even if it streams the most."""
        return not self.working or 0 in self.limits

    def expected(self, limits: Sequence[int] | None = None) -> list[int]:
        """Bytes of weights on each rank's device under `limits`, by the file's header. None: under the present limits."""
        if limits is None and not self.working:
            return [held if limit else 0 for held, limit in zip(self.device_bytes, self.limits, strict=True)]
        by_rank = zip(self.weights, self.limits if limits is None else limits, strict=True)
        return [weights.on_device(limit) if limit else 0 for weights, limit in by_rank]

    def set(self, resident: Sequence[int], poll: Poll, working: bool = True) -> None:
        """Limit the bytes of weights on each rank's device, see loading.SetResident.

        Waits for micro-steps in progress, and for the copies.
        """
        with self._lock:
            by_rank = zip(self.limits, self.device_bytes, resident, strict=True)
            limits = tuple(limit if limit == ALL and size >= present else size for limit, present, size in by_rank)
            future = self.tell(limits, working)
        if future is not None:  # waited for without the lock, which the pool's thread may need before the reply comes
            self._held = wait_for(future, poll)  # `_note` may be called later

    def tell(self, limits: Sequence[int], working: bool = True) -> Future | None:
        """As `set`, without waiting: ranks move weights before they handle later messages. None: nothing changes."""
        with self._lock:
            if (tuple(limits), working) == (self.limits, self.working):
                return None
            future = self._ranks.ask(SetResident(tuple(limits), working), Residency)
            self.limits, self.working = tuple(limits), working
            future.add_done_callback(self._note)
            return future

    def wake(self) -> None:
        """Bring the weights that ranks need to compute to their devices, before they handle later messages."""
        if self.parked:
            self.tell([max(limit, one.least) for one, limit in zip(self.weights, self.limits, strict=True)])

    def adapted(self, answered: Future) -> None:
        """Note each rank's bytes of host memory after additions to the weights (LoRA) were added or freed.

        `answered`: the ranks' replies, see Adapted. To be called in the order of the replies.
        """
        if answered.exception() is None:
            in_host = zip(self._held, answered.result(), strict=True)
            self._held = [replace(held, host_bytes=reply.host_bytes) for held, reply in in_host]

    def _note(self, answered: Future) -> None:
        """Note where the weights are. An error is raised to the next caller that asks the ranks."""
        if answered.exception() is None:
            self._held = answered.result()
