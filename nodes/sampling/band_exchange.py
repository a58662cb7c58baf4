"""Tensors that the bands of a run exchange in this process (keys and values are exchanged on the ranks).

A turn is a band's call of one function, counted from 0: all bands make the same calls in the same order.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.extrapolation import step_ratio

REACH = 3
"""Turns to look back for a tensor at another time. More than 1, because heun calls the model twice at each time."""


class BandExchange:
    """Lets bands wait for each other. When a band ends, `finish` or (after an error) `close` ends the waiting for it."""

    def __init__(self):
        self._changed = threading.Condition()
        self._finished: set[int] = set()
        self._error: BaseException | None = None

    def close(self, error: BaseException) -> None:
        """Make every band that waits, or will wait, raise `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self, index: int) -> None:
        """Band `index` will make no more calls."""
        with self._changed:
            self._finished.add(index)
            self._changed.notify_all()

    def _wait_for(self, band: int, by_turn: Mapping[int, Any], turn: int) -> None:
        """Wait until `by_turn`, which `band` fills, has this turn. NotLocal if the band has ended without it."""
        self._changed.wait_for(lambda: self._error is not None or turn in by_turn or band in self._finished)
        if self._error is not None:
            raise self._error
        if turn not in by_turn:
            raise NotLocal("the patches did not make the same number of model calls")


def moved(values: Mapping[int, torch.Tensor], times: Mapping[int, float], last: int, turn: int) -> torch.Tensor:
    """A band's tensor of turn `last`, extrapolated to the time of `turn` along the line through the last two times.

    `values` and `times` hold the last REACH turns.
    """
    earlier = range(last - 1, turn - REACH - 1, -1)
    before = next((at for at in earlier if at in values and times[at] != times[last]), None)
    if last == turn or before is None:
        return values[last]
    return values[before].lerp(values[last], 1 + step_ratio(times[before], times[last], times[turn]))
