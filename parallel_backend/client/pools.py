"""The pools of ranks that this process has, by their devices."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from parallel_backend.core.devices import on_ray
from parallel_backend.processes.pool import LinksDown, Pool
from parallel_backend.wire.rank_settings import P2P_DISABLE, SELF_TEST, SelfTest

log = logging.getLogger(__name__)
T = TypeVar("T")
SECOND_TRY_SECONDS = 15.0
"""Limit of the self-test's parts without P2P: who has waited a minute in vain is not to wait for another one."""


class Pools:
    """Pools on devices that are apart stay beside each other. `start`: makes one. Not thread-safe: the registry locks."""

    def __init__(self, start: Callable[[tuple[str, ...], SelfTest], Pool]):
        self._start = start
        self._pools: tuple[Pool, ...] = ()  # the one used last is the last
        self._without_p2p: set[tuple[str, ...]] = set()

    @property
    def working(self) -> tuple[Pool, ...]:
        """Those that have not failed; the one used last is the last."""
        return tuple(pool for pool in self._pools if pool.error is None)

    def use(self, devices: tuple[str, ...], what: Callable[[Pool], T]) -> T:
        """What `what` gives with the ranks on these devices, started if they do not run.

        Where NCCL's links fail their self-test, once more with new ranks that have P2P off: what fails first is direct
        access between consumer cards. It stays off for these devices as long as the process lives.
        """
        pool = self._on(devices)
        try:
            return what(pool)
        except LinksDown as error:
            if error.backend != "nccl" or not pool.self_test.p2p or P2P_DISABLE in os.environ:
                raise
            log.warning("%s\nParallel DiT: starting new ranks without P2P", str(error))
        self.end(devices, politely=False)
        self._without_p2p.add(devices)
        pool = self._on(devices)
        try:
            return what(pool)
        except BaseException:  # it was not P2P, or nobody knows: Cancel, a file that cannot be read
            self._without_p2p.remove(devices)
            raise

    def end_failed(self) -> None:
        """Forget pools that have failed."""
        for pool in self._pools:
            if pool.error is not None:
                self.end(pool.devices)

    def end(self, devices: tuple[str, ...], politely: bool = True) -> None:
        """End the ranks on these devices, if there are such. `politely`: see Pool.close."""
        ended = [pool for pool in self._pools if pool.devices == devices]
        self._pools = tuple(pool for pool in self._pools if pool not in ended)
        for pool in ended:
            pool.close(politely)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools:
            self.end(pool.devices)

    def _on(self, devices: tuple[str, ...]) -> Pool:
        """The pool on these devices, from now on the one used last. Pools that have failed end, and those that have one of
        these devices and others."""
        self.end_failed()
        for pool in self._pools:
            if pool.devices != devices and not apart(pool.devices, devices):
                self.end(pool.devices)
        there = [pool for pool in self._pools if pool.devices == devices]
        if not there:
            log.info("Parallel DiT: starting %d ranks on %s", len(devices), ", ".join(devices))
            without = devices in self._without_p2p
            self_test = replace(SELF_TEST, p2p=False, seconds=SECOND_TRY_SECONDS) if without else SELF_TEST
            there = [self._start(devices, self_test)]
        self._pools = (*(pool for pool in self._pools if pool not in there), *there)
        return there[0]


def apart(these: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """All are of this machine, and none is in both. Where a device on Ray is, Ray decides."""
    return not any(map(on_ray, (*these, *others))) and not {*these} & {*others}
