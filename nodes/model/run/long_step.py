"""Progress of a long step: the first step of a run, or one in which ranks compile."""

import weakref

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.wire.lifecycle import COMPILING

from ...ui.loading_bar import Elapsed

PATIENCE = 5
"""Seconds after which the user is told that a step takes a long time."""


def long_step(model: RemoteTransformer, first: bool) -> Elapsed:
    """Return a poll for a run's calls of `model`, which tells the user why a step takes a long time. `first`: the model has
    answered no call of the run so far."""
    before, of_model = model.answered if first else None, weakref.ref(model)
    return Elapsed(lambda: "" if (here := of_model()) is None else _why(here, before), PATIENCE)


def _why(model: RemoteTransformer, before: int | None) -> str:
    """Return the reason for the wait. Empty: there is no special reason. `before`: number of calls that were answered before
    the run. None: it has an answer."""
    pool = model.pool
    compiling = [rank for rank in range(len(pool.devices)) if pool.doing(rank) == COMPILING]
    if compiling:
        return f"rank {compiling[0]} compiles"
    if model.answered != before:
        return ""
    gigabytes = sum(model.streamed_bytes) / 1e9
    return "first step" + f" (each step copies {gigabytes:.1f} GB of weights to the devices)" * (gigabytes >= 0.05)
