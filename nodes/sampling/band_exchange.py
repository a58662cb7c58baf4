"""Tensors that the bands of a run exchange in this process (keys and values are exchanged on the ranks). A turn is one
band's call of one function, counted from 0. All bands make the same calls in the same order."""

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.client.pipefusion.banded_run import NotLocal
from parallel_backend.core.extrapolation import step_ratio

REACH = 3
"""Number of turns to look back for a tensor at another timestep. More than 1, because heun calls the model twice at each
one."""


class BandExchange:
    """Joins the bands' tensors into one of the whole latent. When a band ends, it must call `finish`, or `close` after an
    error, so that other bands do not wait for it.

    `exact_above`: see Band. `extrapolate`: whether tensors of the previous turn are extrapolated to this turn's timestep, as
    keys are.
    """

    def __init__(self, cut: BandCut, exact_above: float, extrapolate: bool):
        self.cut, self.exact_above, self.extrapolate = cut, exact_above, extrapolate
        # Kind of tensor -> for each band: turn -> tensor. And turn -> time.
        self._tensors: dict[tuple, list[dict[int, torch.Tensor]]] = defaultdict(lambda: [{} for _ in cut.rows])
        self._times: dict[tuple, dict[int, float]] = defaultdict(dict)
        self._changed = threading.Condition()
        self._finished: set[int] = set()
        self._error: BaseException | None = None

    def close(self, error: BaseException) -> None:
        """Have every band that waits, or will wait, raise `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self, index: int) -> None:
        """Record that band `index` will make no more calls."""
        with self._changed:
            self._finished.add(index)
            self._changed.notify_all()

    def put(self, index: int, key: tuple, turn: int, value: torch.Tensor) -> None:
        """Store the part of band `index` of this kind of tensor."""
        with self._changed:
            self._tensors[key][index][turn] = value
            self._tensors[key][index].pop(turn - REACH - 1, None)
            self._changed.notify_all()

    def whole(
        self, index: int, key: tuple, turn: int, time: float, value: torch.Tensor, exchanged_before: bool
    ) -> torch.Tensor:
        """Store the part of band `index`, and return the tensor of the whole latent.

        It has this turn's rows of this band and earlier bands, and the previous turn's rows of later bands. At exact steps,
        all rows are of this turn. `key`: kind of tensor. `exchanged_before`: whether this kind was exchanged in the previous
        turn.
        """
        self.put(index, key, turn, value)
        with self._changed:
            times = self._times[key]
            times[turn] = time
            exact = time > self.exact_above or not exchanged_before
            parts = []
            for band, values in enumerate(self._tensors[key]):
                last = turn if exact or band <= index else turn - 1
                self._wait_for(band, values, last)
                parts.append(moved(values, times, last, turn) if self.extrapolate else values[last])
        return self.cut.whole(parts)

    def _wait_for(self, band: int, by_turn: Mapping[int, Any], turn: int) -> None:
        """Wait until `by_turn`, which `band` fills, has this turn. Raises NotLocal if the band has ended without it."""
        self._changed.wait_for(lambda: self._error is not None or turn in by_turn or band in self._finished)
        if self._error is not None:
            raise self._error
        if turn not in by_turn:
            raise NotLocal("the patches did not make the same number of model calls")


def moved(values: Mapping[int, torch.Tensor], times: Mapping[int, float], last: int, turn: int) -> torch.Tensor:
    """Return an estimate of a band's tensor at the timestep of `turn`, if the newest known one is from turn `last`. It is
    extrapolated linearly from the last two different timesteps. `values` and `times` have the last REACH turns."""
    earlier = range(last - 1, turn - REACH - 1, -1)
    before = next((at for at in earlier if at in values and times[at] != times[last]), None)
    if last == turn or before is None:
        return values[last]
    return values[before].lerp(values[last], 1 + step_ratio(times[before], times[last], times[turn]))
