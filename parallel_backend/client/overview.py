"""An overview of ranks and their models for the user. It is read without a message to any rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from parallel_backend.processes.pool import Pool
from parallel_backend.wire.lifecycle import IDLE

from .models_on_ranks import OnRanks

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class RankOverview:
    """One rank. The field names are those of a JSON."""

    device: str
    state: str
    """"starting", "idle", "waiting" (for another rank), "working", or "failed"."""
    doing: str
    """The rank's work, as a text. Empty: none or unknown."""
    weights: int
    """Bytes of weights and LoRAs on its device."""
    run: int
    """Bytes of keys, values and prompts on its device."""
    free: int
    """Free bytes of the device, or of a CPU's machine."""
    total: int
    """All bytes of it. 0: not known yet."""


@dataclass(frozen=True)
class ModelOverview:
    """A model on ranks."""

    name: str
    """Name of the model's file."""
    degrees: str
    weights: tuple[int, ...]
    """Bytes of weights on the device of each rank."""
    streamed: tuple[int, ...]
    """By rank, bytes of weights that it copies to its device in each step, or that another model has displaced."""
    parked: bool
    """Another model has displaced all weights."""
    computing: tuple[float, ...]
    """By rank, the share of the last run's time in which it computed instead of waiting. Empty: unknown, such as for runs
    without Apply PipeFusion and PipeFusion Sampler."""


@dataclass(frozen=True)
class PoolOverview:
    """The ranks on one set of devices."""

    ranks: tuple[RankOverview, ...]
    models: tuple[ModelOverview, ...]
    """Models in the order of their last use, the newest last."""
    links: tuple[tuple[int, int, float, float], ...]
    """Two ranks, the lower one first, bytes a second and seconds of latency, as measured last. Empty: not known."""
    notes: tuple[str, ...]
    error: str
    """The first line of the error that ended the ranks. Empty: they work."""
    logs: str
    """Folder of their logs. Empty: they have none that stays."""


def overview_of(pool: Pool, models: Sequence[OnRanks]) -> PoolOverview:
    """`models`: those on the pool, the least recently used first."""
    error = "" if pool.error is None else str(pool.error).partition("\n")[0]
    found = tuple(map(_model, models))
    held = [sum(model.weights[rank] for model in found) for rank in range(len(pool.devices))]
    logs = pool.ranks.logs
    return PoolOverview(
        ranks=tuple(_rank(pool, rank, held[rank]) for rank in range(len(pool.devices))),
        models=found,
        links=tuple((*pair, *link) for pair, link in pool.links.items()),
        notes=pool.notes,
        error=error,
        logs="" if logs is None else str(logs),
    )


def _rank(pool: Pool, rank: int, weights: int) -> RankOverview:
    beat = pool.watchdog.beat(rank)
    if pool.error is not None:
        state = "failed"
    elif beat is None or not pool.ready.done():
        state = "starting"
    elif beat.waiting:
        state = "waiting"
    else:
        state = "idle" if beat.doing == IDLE else "working"
    doing = "" if beat is None or state in ("idle", "failed") else beat.doing
    run, free, total = (0, 0, 0) if beat is None else (beat.run_bytes, beat.free_bytes, beat.total_bytes)
    return RankOverview(pool.devices[rank], state, doing, weights, run, free, total)


def _model(one: OnRanks) -> ModelOverview:
    model = one.model
    pool = model.pool

    def by_rank(values: Sequence[N]) -> tuple[N | int, ...]:
        """Values of all ranks of the pool: 0 for ranks without the model. Empty: unknown."""
        places = map(pool.place, range(len(pool.whole.devices)))
        return tuple(0 if place is None else values[place] for place in places) if values else ()

    on_devices = [weights + adapters for weights, adapters in zip(model.weight_bytes, model.adapter_bytes, strict=True)]
    took = [(run.compute_seconds, run.wait_seconds + run.streaming_wait_seconds) for run in model.last_run]
    computing = tuple(round(computed / max(computed + waited, 1e-9), 3) for computed, waited in took)
    return ModelOverview(
        model.checkpoint.path.name,
        str(model.degrees),
        by_rank(on_devices),
        by_rank(model.streamed_bytes),
        model.is_parked,
        by_rank(computing),
    )
