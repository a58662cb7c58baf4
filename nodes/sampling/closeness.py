"""Keeps the steps of a run exact until the patches are expected to be as close to one GPU's result as the user asks.

After the warm-up each guided prediction is computed in both ways: in patches, and exactly, without the run's keys. The
sampler goes on with the exact one. Their difference is the error of one step in patches. The errors of the later steps are
expected from it:

- At a step from s to t, the error e of the denoised latent moves the latent by (s - t) / s * e.
- The keys that a patch sees are one step old, so e / s grows with the noise level's change before the step. The
  estimate does not assume that e / s falls after smaller changes.
- Errors of different steps are independent: their squares add up.

A margin covers what one early step cannot tell of the later ones. It is larger under samplers that draw noise between steps:
the noise changes keys by more than the noise level does.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import torch

from parallel_backend.client.pipefusion.band_cut import BandCut

from ..model.run.band import BAND_KEY, Band
from .band_exchange import BandExchange

WRAPPER_KEY = "parallel_dit_closeness"
MARGIN, MARGIN_OF_NOISE = 6.0, 18.0
"""Decibels by which the expected closeness is less than the computed one, and under samplers that draw noise. See
benchmarks/results/closeness_mini_2cores_2026-12-01.json."""


class FewerPatches(Exception):
    """Raised in a band if the run is not close enough yet and fewer patches are possible: the run begins again with them."""


def expected_error(error: float, before: float, sigma: float, sigmas: list[float]) -> float:
    """Return the expected RMS error of the final latent, if all steps after the one at `sigma` are in patches.

    `error`: RMS error of the denoised latent in patches at `sigma`. `before`: the sigma of the call before it. `sigmas`:
    those of the run, falling.
    """
    steps = [sigma, *(each for each in sigmas if each < sigma * (1 - 1e-6))]
    moved = [
        (here - after) * error / sigma * max(1.0, (above - here) / (before - sigma))
        for (above, here), after in zip(pairwise(steps), steps[2:], strict=False)
    ]
    return math.hypot(*moved)


class Closeness(BandExchange):
    """The closeness that a run's user asks for. `asked`: in dB of the latent: 20 log10(its standard deviation / RMS error).
    `fewest`: the number of patches that fills the pipeline. `noisy`: whether the sampler draws noise between steps.

    `expected`: the closeness in dB, from the last step that was computed in both ways. Infinite if no step follows it. None:
    there was none.
    """

    def __init__(self, cut: BandCut, asked: float, sigmas: torch.Tensor, fewest: int, noisy: bool):
        super().__init__(cut, exact_above=math.inf, extrapolate=False)
        self.asked, self.sigmas, self.margin = asked, sigmas.tolist(), MARGIN_OF_NOISE if noisy else MARGIN
        self.could_be_fewer = len(cut.rows) > fewest
        self.expected: float | None = None

    def give_to(self, guider: comfy.samplers.CFGGuider, band: Band) -> None:
        """Have the guider judge the calls of `band`. All bands of the run come to the same result."""
        guider.model_options = comfy.model_patcher.create_model_options_clone(guider.model_options)
        comfy.patcher_extension.add_wrapper_with_key(
            comfy.patcher_extension.WrappersMP.PREDICT_NOISE,
            WRAPPER_KEY,
            _BandCloseness(self, band).predict_noise,
            guider.model_options,
            is_model_options=True,
        )


class _BandCloseness:
    """ComfyUI's wrapper PREDICT_NOISE for one band."""

    def __init__(self, shared: Closeness, band: Band):
        self.shared, self.band = shared, band
        self._turn, self._is_close = 0, False
        self._before = self._sigma = math.inf  # of the last calls, at different sigmas

    def predict_noise(self, executor, x: torch.Tensor, timestep: torch.Tensor, model_options: dict, seed: int | None):
        """The guider's prediction of the denoised latent: exact, until patches are close enough."""
        sigma = float(timestep.max())
        repeated = sigma == self._sigma
        if not repeated:
            self._before, self._sigma = self._sigma, sigma
        if self._is_close or sigma > self.band.exact_above:
            return executor(x, timestep, model_options, seed)
        if repeated:  # as heun's first call of a step: the keys are those of this sigma, and tell nothing of later calls
            return executor(x, timestep, self._exactly(model_options, exact_above=-1.0), seed)
        in_patches = executor(x, timestep, model_options, seed)
        exact = executor(x, timestep, self._exactly(model_options, apart=True), seed)
        self._judge(sigma, exact, in_patches - exact)
        return exact

    def _exactly(self, model_options: dict[str, Any], **changed: Any) -> dict[str, Any]:
        """A copy of `model_options` whose calls are exact, by these changes of their Band."""
        options = comfy.model_patcher.create_model_options_clone(model_options)
        options["transformer_options"][BAND_KEY] = replace(self.band, **changed)
        return options

    def _judge(self, sigma: float, exact: torch.Tensor, error: torch.Tensor) -> None:
        """Decide whether later calls run in patches. Raises FewerPatches."""
        shared, self._turn = self.shared, self._turn + 1
        whole, wrong = (self._whole(kind, value, sigma) for kind, value in (("exact", exact), ("error", error)))
        rms = float(wrong.square().mean().sqrt())
        if not math.isfinite(self._before):  # the run's first call has no keys yet, and is always exact
            return
        expected = expected_error(rms, self._before, sigma, shared.sigmas)
        shared.expected = 20 * math.log10(float(whole.std()) / expected) - shared.margin if expected else math.inf
        self._is_close = shared.expected >= shared.asked
        if not self._is_close and shared.could_be_fewer:
            raise FewerPatches

    def _whole(self, kind: str, value: torch.Tensor, sigma: float) -> torch.Tensor:
        return self.shared.whole(self.band.index, (kind,), self._turn, sigma, value, exchanged_before=False)
