"""Costs of single blocks in the engine's micro-steps, for rehearsals, which load a few blocks in place of all."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from parallel_backend.rank.comm.transfers import Elapsed, Traffic
from parallel_backend.wire.sampling import BlockStats


class BlockWatch:
    """Seconds (on CUDA of the stream, see Clock) and bytes of each block in `only`, with its transfers."""

    def __init__(self, model: nn.Module, only: Collection[str], traffic: Traffic):
        self.traffic = traffic
        self._seconds = {name: Elapsed(traffic.clock) for name in only}
        self._bytes: dict[str, Counter[str]] = {name: Counter() for name in only}
        self._entered: tuple[Any, Counter[str]] | None = None
        for name in only:
            self._watch(name, model.get_submodule(name))

    def drain(self) -> dict[str, BlockStats]:
        """Costs by block since the last `drain`."""
        costs = {name: BlockStats(self._seconds[name].drain(), dict(self._bytes[name])) for name in self._seconds}
        for count in self._bytes.values():
            count.clear()
        return costs

    def _watch(self, name: str, block: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._entered = (self.traffic.clock.now(), self.traffic.bytes_sent.copy())

        def leave(*_: object) -> None:
            assert self._entered is not None
            started, before = self._entered
            self._seconds[name].add(started, self.traffic.clock.now())
            self._bytes[name] += self.traffic.bytes_sent - before

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
