"""Progress of a step that takes long: the first one of a run, and any in which ranks compile."""

import time

from parallel_backend.client.remote_transformer import RemoteTransformer
from parallel_backend.wire.lifecycle import COMPILING

from ...ui.host import check_cancelled
from ...ui.node_text import say

PATIENCE = 5
"""Seconds after which the user is told that a step takes long."""


class LongStep:
    """A poll for calls of `model`: checks for Cancel, and tells the user each second why the step takes long. `first`: the
    model has answered no call of the run so far."""

    def __init__(self, model: RemoteTransformer, first: bool):
        self._model, self._before = model, model.answered if first else None
        self._reason, self._since, self._said = "", 0.0, 0

    def __call__(self) -> None:
        """Poll. Raises ComfyUI's InterruptProcessingException after the user has pressed Cancel."""
        check_cancelled()
        reason, now = self._why(), time.monotonic()
        if reason != self._reason:
            self._reason, self._since, self._said = reason, now, 0
        seconds = int(now - self._since)
        if reason and seconds >= PATIENCE and seconds > self._said:
            self._said = seconds
            say(f"Parallel DiT: {reason}, {seconds} s")

    def _why(self) -> str:
        """Return the reason for the wait. Empty: there is no special reason."""
        pool = self._model.pool
        compiling = [rank for rank in range(len(pool.devices)) if pool.doing(rank) == COMPILING]
        if compiling:
            return f"rank {compiling[0]} compiles"
        if self._model.answered != self._before:
            return ""
        gigabytes = sum(self._model.streamed_bytes) / 1e9
        return "first step" + f" (each step copies {gigabytes:.1f} GB of weights to the devices)" * (gigabytes >= 0.05)
