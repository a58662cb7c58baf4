"""What bands of a run need of each other beside keys and values: tensors by turn, and an end to all waiting.

A turn is a band's call of the same thing, counted from 0: every band makes the same calls in the same order.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.extrapolation import step_ratio

REACH = 3
"""How many turns back the latest tensor at another time may be: heun asks twice at each."""


class BandExchange:
    """Lets bands wait for each other. `close` and `finish` end the waiting, whichever way a band ends."""

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

    def _wait_for(self, band: int, made: Mapping[int, Any], turn: int) -> None:
        """Wait until `band` has put its part of that turn into `made`. Raises NotLocal if it never will."""
        self._changed.wait_for(lambda: self._error is not None or turn in made or band in self._finished)
        if self._error is not None:
            raise self._error
        if turn not in made:
            raise NotLocal("the bands did not make the same number of model calls")


def moved(values: Mapping[int, torch.Tensor], times: Mapping[int, float], last: int, turn: int) -> torch.Tensor:
    """A band's tensor of turn `last`, as it should be at the time of `turn`: along the line through the last two times.

    `values` and `times` have the last REACH turns.
    """
    earlier = range(last - 1, turn - REACH - 1, -1)
    before = next((at for at in earlier if at in values and times[at] != times[last]), None)
    if last == turn or before is None:
        return values[last]
    return values[before].lerp(values[last], 1 + step_ratio(times[before], times[last], times[turn]))
