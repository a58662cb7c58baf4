"""ControlNets under PipeFusion: run by ComfyUI on the whole latent, their outputs cut for the bands.

A ControlNet looks at the whole latent, which no band has. So it runs once per step, when band 0 asks, on what is the latest
of every band: band 0's latent of this step, and those of the step before of the other bands. That is as old as the keys
that PipeFusion's bands see of each other, and is moved on as they are. At exact steps it waits for all bands, and is exact.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.core.device_copies import to_device, to_host
from parallel_backend.core.spans import Span
from parallel_backend.families.base.patching import Patching

from ..model.controlnet import Control
from .band_exchange import REACH, BandExchange, moved


@dataclass
class _Calls:
    """Calls for one set of conditionings, by turn: each band's latents, band 0's times, ControlNet's answers."""

    latents: list[dict[int, torch.Tensor]]
    made: list[int]  # calls by band
    times: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Control | None] = field(default_factory=dict)

    def forget(self, turn: int) -> None:
        """Drop what no call after `turn` reads."""
        self.answers.pop(turn - 2, None)
        for past in (*self.latents, self.times):
            past.pop(turn - REACH - 1, None)


class BandedControl(BandExchange):
    """A ControlNet shared by the bands of a run. Every band makes the same calls in the same order.

    `rows`: each band's latent rows (or frames) of a latent of `shape`; `exact_above`: see Band. `extrapolate`: latents of
    the step before are moved on to this step's time along the line through the last two, as keys are (kv_buffer.py).
    `device`: where the ControlNet computes; bands are on the host.
    """

    def __init__(
        self,
        control: Any,
        patching: Patching,
        rows: tuple[Span, ...],
        shape: tuple[int, ...],
        exact_above: float,
        extrapolate: bool,
        device: torch.device,
    ):
        super().__init__()
        self.device = device
        self.control, self.patching, self.exact_above, self.extrapolate = control, patching, exact_above, extrapolate
        self.grid, patch = patching.grid(shape), patching.band_size
        self._rows = [Span(band.start // patch, -(-band.stop // patch)) for band in rows]
        self._calls: dict[tuple, _Calls] = defaultdict(lambda: _Calls([{} for _ in rows], [0 for _ in rows]))

    def band(self, index: int) -> "BandControl":
        return BandControl(self, index)

    def control_of(
        self, index: int, x: torch.Tensor, t: torch.Tensor, cond: Any, batched: int, options: Any
    ) -> Control | None:
        """`get_control` for band `index`, on that band's thread."""
        with self._changed:
            calls = self._calls[tuple(options["uuids"])]
            turn = calls.made[index]
            calls.made[index] += 1
            calls.latents[index][turn] = x
            self._changed.notify_all()
            if index == 0:
                calls.times[turn] = float(t.max())
                whole = self._whole(calls, turn)
        if index == 0:
            # Without the lock: meanwhile the other bands take the answer of the step before.
            answer = self._evaluate(whole, t, cond, batched, options)
            with self._changed:
                calls.answers[turn] = answer
                self._changed.notify_all()
        with self._changed:
            self._wait_for(0, calls.answers, turn)
            answer = calls.answers[turn]
            calls.forget(turn)
        if answer is None:
            return None
        cut = {id(whole): self._cut(whole, index) for tensors in answer.values() for whole in tensors if whole is not None}
        return {kind: [None if whole is None else cut[id(whole)] for whole in tensors] for kind, tensors in answer.items()}

    def _evaluate(self, whole: torch.Tensor, t: torch.Tensor, cond: dict, batched: int, options: Any) -> Control | None:
        """ControlNet's answer on the host, where it is cut and sent on."""
        if self.device == whole.device:
            return self.control.get_control(whole, t, cond, batched, options)
        own = {name: self._there(value) for name, value in cond.items()}
        answer = self.control.get_control(self._there(whole), self._there(t), own, batched, options)
        if answer is None:
            return None
        made = {id(tensor): tensor for tensors in answer.values() for tensor in tensors if tensor is not None}
        here = dict(zip(made, to_host(list(made.values())), strict=True))
        return {kind: [None if each is None else here[id(each)] for each in tensors] for kind, tensors in answer.items()}

    def _there(self, value: Any) -> Any:
        """A tensor, or those in a list, where the ControlNet computes. All else as it is."""
        if isinstance(value, list):
            return [self._there(each) for each in value]
        return to_device(value, self.device) if isinstance(value, torch.Tensor) else value

    def _whole(self, calls: _Calls, turn: int) -> torch.Tensor:
        """The whole latent for band 0's call of this turn, once the other bands have made what it takes of them."""
        exact = turn == 0 or calls.times[turn] > self.exact_above
        last = turn if exact else turn - 1
        for band, latents in enumerate(calls.latents[1:], 1):
            self._wait_for(band, latents, last)
        others = [self._moved(latents, calls.times, last, turn) for latents in calls.latents[1:]]
        return torch.cat([calls.latents[0][turn], *others], self.patching.band_dim)

    def _moved(self, latents: dict[int, torch.Tensor], times: dict[int, float], last: int, turn: int) -> torch.Tensor:
        """A band's latent of turn `last`, as it should be at the time of `turn`."""
        return moved(latents, times, last, turn) if self.extrapolate else latents[last]

    def _cut(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """The band's part of an output. One of another model's size stays as it is: `residuals` refuses it."""
        if whole.shape[1] != torch.Size(self.grid).numel():
            return whole
        rows = self._rows[index]
        return whole.unflatten(1, self.grid).narrow(self.patching.band_dim - 1, rows.start, len(rows)).flatten(1, -2)


class BandControl:
    """Stand-in for a ControlNet in one band's conditioning."""

    def __init__(self, shared: BandedControl, index: int):
        self.shared, self.index = shared, index

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options) -> Control | None:
        return self.shared.control_of(self.index, x_noisy, t, cond, batched_number, transformer_options)
