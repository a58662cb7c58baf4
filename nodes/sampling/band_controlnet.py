"""ControlNets under PipeFusion: ComfyUI runs them on the whole latent, and their outputs are cut for the bands.

A ControlNet needs the whole latent, and a band only has its rows. So the ControlNet runs once per step, when band 0 asks, on
the latest rows of each band: band 0's of this step, and the other bands' of the previous step. They are as old as the other
bands' keys in PipeFusion, and are extrapolated like keys. At exact steps the ControlNet waits for all bands.

A turn is one band's call with the same conditionings, counted from 0. All bands make the same calls in the same order.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.core.device_copies import to_device, to_host
from parallel_backend.core.spans import Span

from ..model.controls.controlnet import Control
from .band_exchange import BandExchange


@dataclass
class _Calls:
    """Calls for one set of conditionings."""

    counts: list[int]
    """For each band, its number of calls so far."""
    answers: dict[int, Control | None] = field(default_factory=dict)
    """Turn -> the ControlNet's output."""


class BandedControl(BandExchange):
    """A ControlNet shared by the bands of a run. `device`: where the ControlNet computes; bands are on the host."""

    def __init__(self, control: Any, cut: BandCut, exact_above: float, extrapolate: bool, device: torch.device):
        super().__init__(cut, exact_above, extrapolate)
        self.control, self.device = control, device
        self.patching, patch = cut.patching, cut.patching.band_size
        self.grid = self.patching.grid(cut.shapes[0])
        self._rows = [Span(band.start // patch, -(-band.stop // patch)) for band in cut.rows]  # in patches
        self._calls: dict[tuple, _Calls] = defaultdict(lambda: _Calls([0 for _ in cut.rows]))

    def band(self, index: int) -> "BandControl":
        return BandControl(self, index)

    def control_of(
        self, index: int, x: torch.Tensor, t: torch.Tensor, cond: Any, batched: int, options: Any
    ) -> Control | None:
        """Return the result of `get_control` for band `index`. Runs on that band's thread."""
        key = tuple(options["uuids"])
        with self._changed:
            calls = self._calls[key]
            turn = calls.counts[index]
            calls.counts[index] += 1
        if index == 0:
            whole = self.whole(index, key, turn, float(t.max()), x, exchanged_before=turn > 0)
            # Without the lock, so that the other bands can take the answer of the step before.
            answer = self._evaluate(whole, t, cond, batched, options)
            with self._changed:
                calls.answers[turn] = answer
                self._changed.notify_all()
        else:
            self.put(index, key, turn, x)
        with self._changed:
            self._wait_for(0, calls.answers, turn)
            answer = calls.answers[turn]
            calls.answers.pop(turn - 2, None)
        if answer is None:
            return None
        return _changed(answer, lambda outputs: [self._cut(each, index) for each in outputs])

    def _evaluate(self, whole: torch.Tensor, t: torch.Tensor, cond: dict, batched: int, options: Any) -> Control | None:
        """Return the ControlNet's output on the host. It is cut there and sent to ranks."""
        if self.device == whole.device:
            return self.control.get_control(whole, t, cond, batched, options)
        cond = {name: self._on_device(value) for name, value in cond.items()}
        answer = self.control.get_control(self._on_device(whole), self._on_device(t), cond, batched, options)
        return None if answer is None else _changed(answer, to_host)

    def _on_device(self, value: Any) -> Any:
        """Return a tensor, or the tensors in a list, on the ControlNet's device. Other values are returned unchanged."""
        if isinstance(value, list):
            return [self._on_device(each) for each in value]
        return to_device(value, self.device) if isinstance(value, torch.Tensor) else value

    def _cut(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return the band's tokens of an output [B, tokens, hidden]. An output of a wrong size stays whole; own_residuals
        refuses it."""
        if whole.shape[1] != torch.Size(self.grid).numel():
            return whole
        rows = self._rows[index]
        return whole.unflatten(1, self.grid).narrow(self.patching.band_dim - 1, rows.start, len(rows)).flatten(1, -2)


def _changed(answer: Control, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Control:
    """Return the outputs after `change`. A tensor that several blocks share is changed once and stays shared, so that it is
    sent to ranks once."""
    outputs = {id(each): each for tensors in answer.values() for each in tensors if each is not None}
    changed = dict(zip(outputs, change(list(outputs.values())), strict=True))
    return {kind: [None if each is None else changed[id(each)] for each in tensors] for kind, tensors in answer.items()}


class BandControl:
    """Replaces a ControlNet in one band's conditioning."""

    def __init__(self, shared: BandedControl, index: int):
        self.shared, self.index = shared, index

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options) -> Control | None:
        return self.shared.control_of(self.index, x_noisy, t, cond, batched_number, transformer_options)
