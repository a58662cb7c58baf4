"""Guidance under PipeFusion that needs the whole latent: norms, projections, standard deviations over all of it.

A band has its own rows alone. So the guider of each band is given the whole latent, put together of every band's latest,
and what it asks the model for is asked for the band's rows and put together likewise: the functions of the MODEL and the
guider see what they would see in one process, and the band takes its own rows of the result. These rows were all made of
the band's own fresh predictions; of the others a function takes little more than a few sums. Bands in front of this one are
at the same step, those behind it a step back, whose tensors are moved on as keys are. That makes nobody wait: the model's
outputs come in this order. At exact steps all bands wait for each other, and every one computes what one process computes.

Functions that keep something from step to step, such as APG's running average, are called once a step by each band. So each
band has copies of them with closures of their own; after the run the original has what the last band's copy kept.
"""

import copy
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import comfy.conds
import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut
from parallel_backend.client.pipefusion.banded_run import NotLocal

from ..ui.other_nodes import name_of
from .band_controlnet import BandControl
from .band_exchange import REACH, BandExchange, moved
from .eligibility import region_of
from .known_local import WHOLE_GUIDANCE

WRAPPER_KEY = "parallel_dit_band_guidance"
POST_CFG = "sampler_post_cfg_function"
"""The model_options' functions behind the guidance."""


class BandedGuidance(BandExchange):
    """Shared by the bands of a run. `exact_above`: see Band. `extrapolate`: tensors of the step before are moved on."""

    def __init__(self, cut: BandCut, exact_above: float, extrapolate: bool):
        super().__init__()
        self.cut, self.exact_above, self.extrapolate = cut, exact_above, extrapolate
        # What is exchanged -> for each band its tensors by turn: the guider's calls, at the same times in all bands.
        self._given: dict[tuple, list[dict[int, torch.Tensor]]] = defaultdict(lambda: [{} for _ in cut.rows])
        self._times: dict[int, float] = {}
        self._kept: list[tuple[Callable, Callable]] = []  # functions of the MODEL, and the last band's copies

    def give_to(self, guider: comfy.samplers.CFGGuider, index: int, options: dict[str, Any]) -> None:
        """Have the guider of band `index` be given the whole. `options`: the model_options of its calls."""
        for name, value in options.items():
            if isinstance(value, list):
                options[name] = [self._own(function, index) for function in value]
            else:
                options[name] = self._own(value, index)
        cut_already = {id(entry) for conds in guider.conds.values() for entry in conds or ()}
        band = BandGuidance(self, index, cut_already, options.get(POST_CFG, ()))
        kinds, add = comfy.patcher_extension.WrappersMP, comfy.patcher_extension.add_wrapper_with_key
        guider.model_options = comfy.model_patcher.create_model_options_clone(guider.model_options)
        add(kinds.PREDICT_NOISE, WRAPPER_KEY, band.predict_noise, guider.model_options, is_model_options=True)
        add(kinds.CALC_COND_BATCH, WRAPPER_KEY, band.evaluate, options, is_model_options=True)

    def _own(self, value: Any, index: int) -> Any:
        """An option of the MODEL, or a copy of it where it is a function that may keep something."""
        if not isinstance(value, types.FunctionType) or (changed := WHOLE_GUIDANCE.get(name_of(value))) is None:
            return value
        own = with_own_closure(value, changed)
        if index == len(self.cut.rows) - 1:
            self._kept.append((value, own))
        return own

    def keep(self) -> None:
        """After a run: the MODEL's functions have what the last band's copies have, for a run that goes on from there."""
        for original, own in self._kept:
            for cell, last in zip(original.__closure__ or (), own.__closure__ or (), strict=True):
                cell.cell_contents = last.cell_contents

    def whole(self, index: int, key: tuple, turn: int, time: float, value: torch.Tensor, given_before: bool) -> torch.Tensor:
        """The whole of what band `index` has `value` of. `given_before`: the bands gave theirs in the turn before, too."""
        with self._changed:
            given = self._given[key]
            given[index][turn], self._times[turn] = value, time
            given[index].pop(turn - REACH - 1, None)
            self._changed.notify_all()
            exact = time > self.exact_above or not given_before
            parts = []
            for band, values in enumerate(given):
                last = turn if exact or band <= index else turn - 1
                self._wait_for(band, values, last)
                parts.append(moved(values, self._times, last, turn) if self.extrapolate else values[last])
        return self.cut.whole(parts)


class BandGuidance:
    """ComfyUI's wrappers PREDICT_NOISE and CALC_COND_BATCH for one band.

    `cut_already`: ids of its guider's conditionings. `of_the_model`: the MODEL's own functions behind the guidance.
    """

    def __init__(self, shared: BandedGuidance, index: int, cut_already: set[int], of_the_model: Sequence[Callable]):
        self.shared, self.index, self.cut_already, self.of_the_model = shared, index, cut_already, of_the_model
        self._turn, self._evaluations, self._time = -1, 0, 0.0
        self._shape: torch.Size | None = None  # of the whole latent
        self._last: dict[tuple, int] = {}  # what was exchanged -> at which turn last

    def predict_noise(self, executor, x: torch.Tensor, timestep: torch.Tensor, model_options: dict, seed: int | None):
        """The band's rows of what the guider makes of the whole latent."""
        self._turn, self._evaluations, self._time = self._turn + 1, 0, float(timestep.max())
        whole = self._whole(("latent",), x)
        self._shape = whole.shape
        behind = model_options.get(POST_CFG, ())
        # The *_cfg_pp samplers append one of their own, to have the unconditional prediction: the band's.
        own = [each if any(each is known for known in self.of_the_model) else self._for_the_band(each) for each in behind]
        return self._cut(executor(whole, timestep, {**model_options, POST_CFG: own}, seed))

    def _for_the_band(self, function: Callable[[dict], torch.Tensor]) -> Callable[[dict], torch.Tensor]:
        return lambda arguments: function({name: self._cut(value) for name, value in arguments.items()})

    def _cut(self, value: Any) -> Any:
        """The band's rows of a tensor of the whole latent. All else as it is."""
        whole = isinstance(value, torch.Tensor) and value.shape == self._shape
        return self.shared.cut.band(value, self.index) if whole else value

    def evaluate(
        self, executor, model, conds: list, x_in: torch.Tensor, timestep: torch.Tensor, model_options: dict
    ) -> list:
        """Predictions for the whole latent, of which this band asks the model for its own rows."""
        if x_in.shape != self._shape:
            raise NotLocal("a function on the MODEL asks for another latent than the sampler's")
        self._evaluations += 1
        own = [entries and [self._of_the_band(entry) for entry in entries] for entries in conds]
        outputs = executor(model, own, self._cut(x_in).contiguous(), timestep, model_options)
        key = (self._evaluations, *(entries is None for entries in conds))
        return [self._whole((*key, number), output) for number, output in enumerate(outputs)]

    def _whole(self, key: tuple, value: torch.Tensor) -> torch.Tensor:
        given_before, self._last[key] = self._last.get(key) == self._turn - 1, self._turn
        return self.shared.whole(self.index, key, self._turn, self._time, value, given_before)

    def _of_the_band(self, entry: dict) -> dict:
        """A conditioning that a function made during the run, for the whole latent, cut to the band's rows."""
        if id(entry) in self.cut_already:
            return entry
        control = entry.get("control")
        region = region_of(entry) or entry.get("mask") is not None
        if region or not (control is None or isinstance(control, BandControl)):
            raise NotLocal("a function on the MODEL makes a conditioning of its own for a part of the latent")
        cut = self.shared.cut
        dim, rows = cut.patching.band_dim, cut.rows[self.index]
        values = dict(entry["model_conds"])
        for name, value in values.items():
            if isinstance(value, comfy.conds.CONDNoiseShape) and value.cond.shape[dim] != len(rows):
                values[name] = value._copy_with(cut.patching.rows(value.cond, rows))
        return entry | {"model_conds": values}


def with_own_closure(function: types.FunctionType, changed: tuple[str, ...]) -> types.FunctionType:
    """A copy of the function that keeps what it keeps in a closure of its own. `changed`: variables of the closure whose
    objects are copied too."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = [types.CellType(copy.copy(cell.cell_contents) if name in changed else cell.cell_contents) for name, cell in cells]
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(own))
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    return made
