"""The pools of ranks of this process, by their devices."""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from parallel_backend.core.cores import usable_cores
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.processes.pool import LinksDown, Pool
from parallel_backend.processes.pool_part import PoolPart, SomeRanks, ranks_on, union
from parallel_backend.wire.rank_settings import (
    BY_GLOO,
    BY_NCCL,
    P2P_DISABLE,
    P2P_OVER_NVLINK,
    SELF_TEST,
    WITHOUT_P2P,
    SelfTest,
    Transport,
)

from .transports import KeptTransports

log = logging.getLogger(__name__)
T = TypeVar("T")
SECONDS = 30.0
"""Time limit of the self-test of links by another transport than NCCL's own choice, whose test may have taken a minute."""
INSTEAD = {
    P2P_OVER_NVLINK: "with P2P over NVLink alone",
    WITHOUT_P2P: "without P2P",
    BY_GLOO: "that use Gloo instead of NCCL",
}
"""The transports to try if NCCL's own choice fails, in this order, in words that follow "ranks"."""


class Pools:
    """Keeps pools on different devices at the same time. Not thread-safe: the registry locks.

    Devices that overlap with a pool's are served by a part of that pool. If the pool lacks some of them, it is ended once
    and started again on the devices of both. `start`: creates a pool. `transports`: those that are not NCCL's own
    choice. `chosen()`: CPU threads of each rank; None: CPU ranks share the cores.
    """

    def __init__(
        self,
        start: Callable[[tuple[str, ...], SelfTest], Pool],
        transports: KeptTransports,
        chosen: Callable[[], int | None] = lambda: None,
    ):
        self._start, self.transports, self._chosen = start, transports, chosen
        self._used: dict[tuple[str, ...], tuple[str, ...]] = {}  # devices of a pool -> those of its last use
        self._pools: tuple[Pool, ...] = ()  # in the order of their last use
        self._begun: set[tuple[str, ...]] = set()  # devices of pools that have been begun for a use to come

    @property
    def all(self) -> tuple[Pool, ...]:
        """All pools. Failed ones stay until the next use drops them."""
        return self._pools

    @property
    def working(self) -> tuple[Pool, ...]:
        """The pools that have not failed, in the order of their last use."""
        return tuple(pool for pool in self._pools if pool.error is None)

    def threads(self, devices: tuple[str, ...], pool: Pool | None = None) -> int | None:
        """CPU threads of each rank on `devices`, in `pool` or in a new one. None: the ranks decide. CPU ranks of all pools
        share the cores. Ranks of a part of a pool also get the cores of its other ranks, which wait meanwhile."""
        if device_kind(devices[0]) != "cpu":
            return None
        cpu_devices = [name for other in self.working if other is not pool for name in other.devices]
        cpu_devices = [name for name in cpu_devices if device_kind(name) == "cpu"]
        return max(1, usable_cores() // len((*devices, *cpu_devices)))

    @property
    def used_last(self) -> SomeRanks | None:
        """The ranks used last."""
        if not (working := self.working):
            return None
        pool = working[-1]
        return self._part(pool, self._used.get(pool.devices, pool.devices))

    def note(self, ranks: SomeRanks) -> None:
        """Record a use of these ranks by a model that is on them, without `use`."""
        if ranks.whole in self._pools:
            self._used[ranks.whole.devices] = ranks.devices
            self._pools = (*(other for other in self._pools if other is not ranks.whole), ranks.whole)

    def serves(self, devices: tuple[str, ...]) -> bool:
        """Whether a working pool has ranks on these devices."""
        return any(ranks_on(devices, pool.devices) is not None for pool in self.working)

    def use(self, devices: tuple[str, ...], action: Callable[[SomeRanks], T], alone: bool = False) -> T:
        """Return the result of `action` with the ranks on these devices, started if necessary. `alone`: no other devices in
        the pool."""
        self.end_failed()
        where = devices if alone else self._where(devices)
        return self._use(where, lambda pool: action(self._part(pool, devices)))

    def _where(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the devices of the pool that will have ranks on `devices`."""
        for pool in self._pools:
            if ranks_on(devices, pool.devices) is not None:
                return pool.devices
        overlapping = [pool.devices for pool in self._pools if not apart(pool.devices, devices)]
        together = union([*overlapping, devices]) if overlapping else None
        return devices if together is None else together

    def _part(self, pool: Pool, devices: tuple[str, ...]) -> SomeRanks:
        """Return the pool's ranks on these devices."""
        self._used[pool.devices] = devices
        ranks = ranks_on(devices, pool.devices)
        assert ranks is not None
        if len(ranks) == len(pool.devices):
            return pool
        return PoolPart(pool, ranks, self.threads(devices, pool) if self._chosen() is None else None)

    def _use(self, devices: tuple[str, ...], action: Callable[[Pool], T]) -> T:
        """Return the result of `action` with the pool on these devices, started if necessary.

        If the self-test of NCCL's links fails, `action` is tried again with new ranks: first with less P2P, because direct
        access between consumer GPUs is the most frequent cause, then with Gloo. What works is stored, see KeptTransports.
        """
        pool = self._on(devices)
        self._begun.discard(devices)
        first, instead = pool.self_test.transport, None
        while True:
            try:
                result = action(pool)
            except LinksDown as error:
                instead = next_after(pool.self_test.transport) if error.backend == "nccl" else None
                if instead is None:
                    self.transports.forget(devices)  # what an earlier start found out does not help now
                    raise
                log.warning("%s\nParallel DiT: starting new ranks %s", str(error), INSTEAD[instead])
            except BaseException:  # the links were not the cause, or that is unknown, such as after Cancel
                if instead is not None:
                    self.transports.forget(devices)
                raise
            else:
                if instead is not None and first == BY_NCCL:
                    self.transports.keep(devices, instead)
                return result
            self.end(devices, politely=False)
            if first != BY_NCCL:  # what an earlier start found out has changed: the next one begins again
                self.transports.forget(devices)
            self.transports.turn_to(devices, instead)
            pool = self._on(devices)

    def begin(self, devices: tuple[str, ...]) -> None:
        """Begin to start ranks on these devices, unless there are ranks on any of them. Does not wait for them.

        If their links fail, the next use gets that error and starts other ranks without P2P. If they end otherwise, it
        starts new ones.
        """
        self.end_failed()
        if all(apart(pool.devices, devices) for pool in self._pools):
            self._on(devices)
            self._begun.add(devices)

    def end_failed(self) -> None:
        """Drop failed pools, except those whose links failed before their first use."""
        for pool in self._pools:
            waits = pool.devices in self._begun and isinstance(pool.error, LinksDown)
            if pool.error is not None and not waits:
                self.end(pool.devices)

    def end(self, devices: tuple[str, ...], politely: bool = True) -> None:
        """End the pool with ranks on these devices, if there is one. `politely`: see Pool.close; ignored while it is
        starting."""
        ended = [pool for pool in self._pools if ranks_on(devices, pool.devices) is not None]
        self._pools = tuple(pool for pool in self._pools if pool not in ended)
        for pool in ended:
            self._begun.discard(pool.devices)
            _close(pool, politely)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools:
            self.end(pool.devices)

    def end_all(self, politely: bool) -> None:
        """End all ranks that this process started. The list of pools does not change, so the caller need not hold the
        registry's lock. A process forked from the one that started a pool has that pool too, but does not end it."""
        for pool in self._pools:
            if pool.process == os.getpid():
                _close(pool, politely)

    def _on(self, devices: tuple[str, ...]) -> Pool:
        """Return the pool on these devices, which becomes the one used last. Ends pools that have failed or share some of
        the devices."""
        self.end_failed()
        for other in self._pools:
            if other.devices != devices and not apart(other.devices, devices):
                self.end(other.devices)
        pool = next((pool for pool in self._pools if pool.devices == devices), None)
        if pool is None:
            log.info("Parallel DiT: starting %d ranks on %s", len(devices), ", ".join(devices))
            pool = self._start(devices, self_test_of(self.transports.of(devices)))
        self._pools = (*(other for other in self._pools if other is not pool), pool)
        return pool


def self_test_of(transport: Transport) -> SelfTest:
    return SELF_TEST if transport == BY_NCCL else SelfTest(SECONDS, transport)


def next_after(transport: Transport) -> Transport | None:
    """Return the transport to try after this one has failed. None: there is no other."""
    order = [BY_GLOO] if P2P_DISABLE in os.environ else [*INSTEAD]
    return next(iter(order[order.index(transport) + 1 :] if transport in order else order), None)


def _close(pool: Pool, politely: bool) -> None:
    """Like Pool.close, but never politely if ranks are still starting: they read no messages, so waiting would take
    seconds."""
    pool.close(politely and pool.ready.done())


def apart(these: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether the pools share no device. False for devices on Ray, which may be the same ones."""
    return not any(map(on_ray, (*these, *others))) and not {*these} & {*others}
