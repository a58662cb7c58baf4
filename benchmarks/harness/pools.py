"""Pools of ranks by their number, kept from case to case where they are few."""

from parallel_backend.processes.pool import Pool


class Pools:
    """`pools(n)`: a pool of n ranks, which are all CPUs or the first n CUDA devices. A context: it ends them.

    Those of at most `kept` ranks stay; of the larger ones the last one does, since their memory and start-up add up.
    """

    def __init__(self, device: str = "cpu", kept: int = 2):
        self._device, self._kept = device, kept
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if world not in self._pools:
            for other in [other for other in self._pools if other > self._kept]:
                self._pools.pop(other).close()
            names = ("cpu",) * world if self._device == "cpu" else tuple(f"cuda:{index}" for index in range(world))
            self._pools[world] = Pool(names, threads=1)
        return self._pools[world]

    def __enter__(self) -> "Pools":
        return self

    def __exit__(self, *_: object) -> None:
        while self._pools:
            self._pools.popitem()[1].close()
