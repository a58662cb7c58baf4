"""Guidance under PipeFusion that needs the whole latent, for norms, projections or standard deviations over all of it.

The guider of each band gets the whole latent, joined from the latest rows of all bands. Its model call is made only for the
band's rows, and the output is joined in the same way. So the functions of the MODEL and the guider get tensors of the whole
latent, as without bands. The band takes its rows of the result. Those rows depend on the band's fresh predictions, and on
the other rows only by a few sums. Bands finish a step in order, so no band waits: the rows of earlier bands are of this
step. The rows of later bands are of the previous step, extrapolated like keys. At exact steps all bands wait for each other,
and each computes the result of a run without bands.

Functions that keep a state from step to step, such as APG's running average, would be called once a step by each band. So
each band gets copies with separate closures. After the run the originals take over the state of the last band's copies.
"""

import copy
import types
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
from .band_exchange import BandExchange
from .eligibility import region_of
from .known_local import WHOLE_GUIDANCE

WRAPPER_KEY = "parallel_dit_band_guidance"
POST_CFG = "sampler_post_cfg_function"
"""Key in model_options of the functions that run after the guidance."""


class BandedGuidance(BandExchange):
    """Guidance shared by all bands. A turn is a call of the guider."""

    def __init__(self, cut: BandCut, exact_above: float, extrapolate: bool):
        super().__init__(cut, exact_above, extrapolate)
        self._copies: list[tuple[Callable, Callable]] = []  # (function of the MODEL, the last band's copy)

    def give_to(self, guider: comfy.samplers.CFGGuider, index: int, options: dict[str, Any]) -> None:
        """Have the guider of band `index` work on the whole latent. `options`: the model_options of its calls."""
        for name, value in options.items():
            if isinstance(value, list):
                options[name] = [self._for_band(function, index) for function in value]
            else:
                options[name] = self._for_band(value, index)
        cut_already = {id(entry) for conds in guider.conds.values() for entry in conds or ()}
        band = BandGuidance(self, index, cut_already, options.get(POST_CFG, ()))
        kinds, add = comfy.patcher_extension.WrappersMP, comfy.patcher_extension.add_wrapper_with_key
        guider.model_options = comfy.model_patcher.create_model_options_clone(guider.model_options)
        add(kinds.PREDICT_NOISE, WRAPPER_KEY, band.predict_noise, guider.model_options, is_model_options=True)
        add(kinds.CALC_COND_BATCH, WRAPPER_KEY, band.evaluate, options, is_model_options=True)

    def _for_band(self, value: Any, index: int) -> Any:
        """Return an option of the MODEL for band `index`: a copy, if it is a function that may keep a state."""
        if not isinstance(value, types.FunctionType) or (changed := WHOLE_GUIDANCE.get(name_of(value))) is None:
            return value
        band_function = with_separate_closure(value, changed)
        if index == len(self.cut.rows) - 1:
            self._copies.append((value, band_function))
        return band_function

    def keep(self) -> None:
        """Copy the state of the last band's functions back to the MODEL's functions after a run. A run that continues this
        one needs that state."""
        for original, copied in self._copies:
            for cell, last in zip(original.__closure__ or (), copied.__closure__ or (), strict=True):
                cell.cell_contents = last.cell_contents


class BandGuidance:
    """ComfyUI's wrappers PREDICT_NOISE and CALC_COND_BATCH for one band. `cut_already`: ids of the guider's conditionings.
    `models_functions`: the MODEL's functions that run after the guidance."""

    def __init__(self, shared: BandedGuidance, index: int, cut_already: set[int], models_functions: Sequence[Callable]):
        self.shared, self.index, self.cut_already, self.models_functions = shared, index, cut_already, models_functions
        self._turn, self._evaluations, self._time = -1, 0, 0.0
        self._shape: torch.Size | None = None  # of the whole latent; None before the first call
        self._last: dict[tuple, int] = {}  # kind of tensor -> the last turn in which it was exchanged

    def predict_noise(self, executor, x: torch.Tensor, timestep: torch.Tensor, model_options: dict, seed: int | None):
        """The band's rows of the guider's prediction for the whole latent."""
        self._turn, self._evaluations, self._time = self._turn + 1, 0, float(timestep.max())
        whole = self._whole(("latent",), x)
        self._shape = whole.shape
        # A *_cfg_pp sampler appends a function that takes the unconditional prediction: it must get the band's rows.
        functions = [
            function if any(function is known for known in self.models_functions) else self._for_the_band(function)
            for function in model_options.get(POST_CFG, ())
        ]
        return self._cut(executor(whole, timestep, {**model_options, POST_CFG: functions}, seed))

    def _for_the_band(self, function: Callable[[dict], torch.Tensor]) -> Callable[[dict], torch.Tensor]:
        return lambda arguments: function({name: self._cut(value) for name, value in arguments.items()})

    def _cut(self, value: Any) -> Any:
        """Return the band's rows of a tensor with the whole latent's shape. Other values are returned unchanged."""
        whole = isinstance(value, torch.Tensor) and value.shape == self._shape
        return self.shared.cut.band(value, self.index) if whole else value

    def evaluate(
        self, executor, model, conds: list, x_in: torch.Tensor, timestep: torch.Tensor, model_options: dict
    ) -> list:
        """Predictions for the whole latent. This band calls the model for its rows; the other bands provide theirs."""
        if x_in.shape != self._shape:
            raise NotLocal("a function on the MODEL needs a different latent from the sampler's")
        self._evaluations += 1
        band_conds = [entries and [self._of_the_band(entry) for entry in entries] for entries in conds]
        outputs = executor(model, band_conds, self._cut(x_in).contiguous(), timestep, model_options)
        key = (self._evaluations, *(entries is None for entries in conds))
        return [self._whole((*key, number), output) for number, output in enumerate(outputs)]

    def _whole(self, key: tuple, value: torch.Tensor) -> torch.Tensor:
        exchanged_before, self._last[key] = self._last.get(key) == self._turn - 1, self._turn
        return self.shared.whole(self.index, key, self._turn, self._time, value, exchanged_before)

    def _of_the_band(self, entry: dict) -> dict:
        """Return a conditioning for the whole latent that a function created during the run, cut to the band's rows."""
        if id(entry) in self.cut_already:
            return entry
        control = entry.get("control")
        region = region_of(entry) or entry.get("mask") is not None
        if region or not (control is None or isinstance(control, BandControl)):
            raise NotLocal("a function on the MODEL makes its own conditioning for a part of the latent")
        cut = self.shared.cut
        dim, rows = cut.patching.band_dim, cut.rows[self.index]
        values = dict(entry["model_conds"])
        for name, value in values.items():
            if isinstance(value, comfy.conds.CONDNoiseShape) and value.cond.shape[dim] != len(rows):
                values[name] = value._copy_with(cut.patching.rows(value.cond, rows))
        return entry | {"model_conds": values}


def with_separate_closure(function: types.FunctionType, changed: tuple[str, ...]) -> types.FunctionType:
    """A copy of the function with a separate closure. `changed`: variables of the closure whose objects are copied too."""
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = tuple(
        types.CellType(copy.copy(cell.cell_contents) if name in changed else cell.cell_contents) for name, cell in variables
    )
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied
