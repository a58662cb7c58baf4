"""Pools of ranks that tests share, and the model on each."""

from collections.abc import Callable
from pathlib import Path

from parallel_backend.checkpoints.checkpoint import open_own_class
from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.processes.local import Ranks
from parallel_backend.processes.pool import Pool
from parallel_backend.processes.watchdog import SILENCE_SECONDS
from parallel_backend.wire.rank_settings import StartSettings
from testing import mini
from testing.models import on_ranks

MOST_RANKS = 8
"""Of all pools of a `Pools` that are open. A rank process takes 200 MB: three test processes with a pool of each size did
not fit a machine of 24 GB."""


class Pools:
    """Pools by number of ranks, started when first asked for and again if they have failed, and the model on each.

    Pools that were not asked for lately end if all together have more than MOST_RANKS ranks.
    """

    def __init__(self, start: Callable[[StartSettings], Ranks], silence: float = SILENCE_SECONDS):
        self.start, self._silence = start, silence
        self._pools: dict[int, Pool] = {}
        self._models: dict[int, tuple[tuple, RemoteTransformer]] = {}

    def __call__(self, world: int) -> Pool:
        pool = self._pools.get(world)
        if pool is not None and pool.error is not None:
            self.end(world)
            pool = None
        if pool is None:
            while self._pools and sum(self._pools) + world > MOST_RANKS:
                self.end(next(iter(self._pools)))
            pool = Pool(("cpu",) * world, start=self.start, silence=self._silence)
            pool.ready.result(timeout=300)
        self._pools.pop(world, None)
        self._pools[world] = pool  # the last one of all
        return pool

    def load(
        self, path: Path, degrees: Degrees, own: OwnClass, dtype: str = "fp32", fresh: bool = False
    ) -> RemoteTransformer:
        """The model of class `own` on ranks; `fresh`: loaded anew even if the ranks hold it already."""
        pool, key = self(degrees.world), (path, degrees, dtype, own)
        known, model = self._models.get(degrees.world, (None, None))
        if fresh or known != key or model.pool is not pool:
            model = on_ranks(pool, open_own_class(path, own), degrees, dtype, "sdpa", lambda: None, own_class=own)
            self._models[degrees.world] = key, model
        return model

    def mini(self, path: Path, degrees: Degrees, dtype: str = "fp32", fresh: bool = False) -> RemoteTransformer:
        """The model of a file of the mini class on ranks."""
        return self.load(path, degrees, mini.proven(mini.config_of(path), degrees.tensor), dtype, fresh)

    def forget(self, world: int) -> None:
        """The next `load` is a real one: what is on these ranks now was not put there by `load`."""
        self._models.pop(world, None)

    def end(self, world: int) -> None:
        """Close this pool, if there is one; the next use starts another."""
        self.forget(world)
        if world in self._pools:
            self._pools.pop(world).close()

    def end_larger_than(self, ranks: int) -> None:
        """Close all pools that have more than so many."""
        for world in [world for world in self._pools if world > ranks]:
            self.end(world)

    def close(self) -> None:
        self.end_larger_than(0)
