"""Where the ranks' weights of one model are: on their devices, or in host memory."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

from parallel_backend.placement.model_sizes import RankWeights
from parallel_backend.placement.residency import ALL
from parallel_backend.processes.model_ranks import ModelRanks
from parallel_backend.processes.pool import Poll, wait_for
from parallel_backend.wire.loading import Loaded, Residency, SetResident


class ResidentWeights:
    """Of a model on `ranks`, by rank. `weights`: of each, by the file's header. Thread-safe.

    `limits`: bytes of weights that may be on each rank's device, as the ranks were told last; ALL where there is no limit.
    `wanted`: bytes that are to be there as long as nobody else needs the room. `working`: see loading.SetResident.
    """

    def __init__(
        self,
        ranks: ModelRanks,
        weights: Sequence[RankWeights],
        limits: Sequence[int] | None = None,
        lock: AbstractContextManager | None = None,
    ):
        """`limits`: those that the model is loaded with. None: no limit. `lock`: that of what sends micro-steps, so that
        none is sent behind a message that takes weights away, by a thread that has not heard of it yet."""
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
        """The model is in place. `replies`: in rank order."""
        self._held = [Residency(reply.rank, reply.weight_bytes, reply.host_bytes) for reply in replies]
        self.wanted = self.device_bytes

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """By rank, of weights on its device."""
        return tuple(held.device_bytes for held in self._held)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """By rank, of weights in host memory."""
        return tuple(held.host_bytes for held in self._held)

    @property
    def parked(self) -> bool:
        """A rank lacks weights on its device without which it can compute nothing."""
        return not self.working or 0 in self.limits

    def expected(self, limits: Sequence[int] | None = None) -> list[int]:
        """Bytes on each rank's device under these limits while it computes, by the file's header. None: of now."""
        if limits is None and not self.working:
            return [held if limit else 0 for held, limit in zip(self.device_bytes, self.limits, strict=True)]
        given = self.limits if limits is None else limits
        return [one.on_device(limit) if limit else 0 for one, limit in zip(self.weights, given, strict=True)]

    def set(self, resident: Sequence[int], poll: Poll, working: bool = True) -> None:
        """From now on at most so many bytes of weights are on each rank's device, see loading.SetResident.

        Waits for micro-steps that are under way, and for the copies.
        """
        with self._lock:
            held = zip(self.limits, self.device_bytes, resident, strict=True)
            limits = tuple(limit if limit == ALL and size >= there else size for limit, there, size in held)
            future = self.tell(limits, working)
        if future is not None:  # nobody else is kept waiting: the pool's thread may have something to tell
            self._held = wait_for(future, poll)  # `_note` may come later than this

    def tell(self, limits: Sequence[int], working: bool = True) -> Future | None:
        """As `set`, without waiting: ranks do it before what they are sent later. None if they were told so last."""
        with self._lock:
            if (tuple(limits), working) == (self.limits, self.working):
                return None
            future = self._ranks.ask(SetResident(tuple(limits), working), Residency)
            self.limits, self.working = tuple(limits), working
            future.add_done_callback(self._note)
            return future

    def wake(self) -> None:
        """Ranks that lack weights on their device get those that they cannot compute without, before what they are sent from
        now on."""
        if self.parked:
            self.tell([max(limit, one.least) for one, limit in zip(self.weights, self.limits, strict=True)])

    def _note(self, answered: Future) -> None:
        """Of an error hears whoever asks the ranks next."""
        if answered.exception() is None:
            self._held = answered.result()
