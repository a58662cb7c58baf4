"""The state of ranks and their models for the sidebar's panel, as JSON values. Reading it sends no message to any rank."""

from collections.abc import Sequence
from typing import Any

from parallel_backend.processes.pool import Pool
from parallel_backend.wire.lifecycle import IDLE

from .models_on_ranks import OnRanks


def overview_of(pool: Pool, models: Sequence[OnRanks]) -> dict[str, Any]:
    """Return the state of a pool. `models`: those on the pool, the least recently used first.

    `ranks`, `models`: see below. `error`: the first line of the error that ended the ranks; empty if they work. `logs`:
    folder of their logs; empty if none.
    """
    found = list(map(_model, models))
    return {
        "ranks": [_rank(pool, rank, sum(model["weights"][rank] for model in found)) for rank in range(len(pool.devices))],
        "models": found,
        "notes": pool.notes,
        "error": "" if pool.error is None else str(pool.error).partition("\n")[0],
        "logs": str(pool.ranks.logs or ""),
    }


def _rank(pool: Pool, rank: int, weights: int) -> dict[str, Any]:
    """One rank's state: "starting", "idle", "waiting" (for another rank), "working", or "failed". `doing`: its work; empty
    if unknown. Bytes on its device (a CPU's machine): `weights`, including LoRAs; `run`: keys, values and prompts; `free`;
    `total`, 0 if unknown."""
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
    named = {"device": pool.devices[rank], "state": state, "doing": doing}
    return named | {"weights": weights, "run": run, "free": free, "total": total}


def _model(one: OnRanks) -> dict[str, Any]:
    """One model. `name`: its file's. `parked`: whether another model has displaced all weights. By rank: `weights`: bytes on
    the device. `streamed`: bytes that are copied to the device in each step, or displaced."""
    model = one.model
    pool = model.pool

    def by_rank(values: Sequence[int]) -> list[int]:
        """Return the values of all ranks of the pool: 0 for ranks without the model."""
        places = map(pool.place, range(len(pool.whole.devices)))
        return [0 if place is None else values[place] for place in places]

    on_devices = [weights + adapters for weights, adapters in zip(model.weight_bytes, model.adapter_bytes, strict=True)]
    return {
        "name": model.checkpoint.path.name,
        "degrees": str(model.degrees),
        "weights": by_rank(on_devices),
        "streamed": by_rank(model.streamed_bytes),
        "parked": model.is_parked,
    }
