"""Parallel Step Cache: its setting travels in the MODEL's transformer_options, its state lives as long as one sampling."""

from dataclasses import dataclass
from typing import Any

import comfy.model_patcher

from parallel_backend.step_cache import StepCache

from .checked import checked
from .node_text import say
from .widgets import CATEGORY

CACHE_KEY = "parallel_dit_step_cache"
"""Key in `transformer_options` under which a MODEL carries its CacheSettings."""


@dataclass(frozen=True)
class CacheSettings:
    """The widgets of Parallel Step Cache."""

    threshold: float
    start_percent: float = 0.0
    end_percent: float = 1.0


class SamplingCache:
    """The cache of one sampling run: of its whole calls, and of the runs in bands that are begun in it."""

    def __init__(self, settings: CacheSettings, model_sampling: Any):
        self.settings = settings
        self._from, self._to = (
            float(model_sampling.percent_to_sigma(percent)) for percent in (settings.start_percent, settings.end_percent)
        )
        self.cache = StepCache(settings.threshold)
        self._reported = False

    def begin(self, bands: int = 1) -> StepCache:
        """For calls in so many bands from now on: what was kept of an attempt before is forgotten."""
        self.cache = StepCache(self.settings.threshold, bands)
        return self.cache

    def report(self) -> str:
        """In words, for whoever says them."""
        self._reported = True
        return self.cache.summary

    def may_forecast(self, options: dict[str, Any]) -> bool:
        """Whether a call with these transformer_options may be forecast: not outside the percents, not in the last step."""
        sigma, steps = float(options["sigmas"].max()), options.get("sample_sigmas")
        last_step = steps is not None and len(steps) > 1 and sigma <= float(steps[-2])
        return self._to < sigma <= self._from and not last_step

    def tell(self) -> None:
        """Say it on the sampler's node, unless somebody else does."""
        if not self._reported:
            say(f"Parallel DiT: {self.cache.summary}")


def with_step_cache(model: comfy.model_patcher.ModelPatcher, settings: CacheSettings) -> comfy.model_patcher.ModelPatcher:
    """A clone of the MODEL; with threshold 0 one that has no cache."""
    patched = model.clone()
    options = patched.model_options["transformer_options"]
    if settings.threshold > 0:
        options[CACHE_KEY] = settings
    else:
        options.pop(CACHE_KEY, None)
    return patched


def begin_cache(model: comfy.model_patcher.ModelPatcher) -> SamplingCache | None:
    """For a sampling run of this MODEL that begins; None where it has no cache."""
    settings = model.model_options["transformer_options"].get(CACHE_KEY)
    return None if settings is None else SamplingCache(settings, model.get_model_object("model_sampling"))


def threshold(default: float, tooltip: str) -> tuple[str, dict]:
    """A FLOAT widget for CacheSettings.threshold."""
    return ("FLOAT", {"default": default, "min": 0.0, "max": 3.0, "step": 0.005, "round": 0.001, "tooltip": tooltip})


@checked()
class ParallelStepCache:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    DESCRIPTION = (
        "Does not compute model calls whose result can be told from the calls before. For a MODEL from Parallel DiT Loader, "
        "in every mode, with or without PipeFusion."
    )

    @classmethod
    def INPUT_TYPES(cls):
        percent = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": (
                    "MODEL",
                    {"tooltip": "From Parallel DiT Loader; LoRA loaders and Apply PipeFusion may stand before or after."},
                ),
                "threshold": threshold(
                    0.04,
                    "How wrong calls may be that are not computed, as a share of the model's output. More is faster and "
                    "further from the uncached picture; 0 turns the cache off. Samplers that draw noise between steps skip "
                    "little below 0.5.",
                ),
                "start_percent": (
                    "FLOAT",
                    {"default": 0.0, **percent, "tooltip": "Compute every call of this first part of the sampling."},
                ),
                "end_percent": (
                    "FLOAT",
                    {"default": 1.0, **percent, "tooltip": "Compute every call after this part; the last step always is."},
                ),
            }
        }

    def apply(self, model, threshold, start_percent, end_percent):
        from .remote_model import remote_stub  # which imports this module

        remote_stub(model)
        return (with_step_cache(model, CacheSettings(threshold, start_percent, end_percent)),)
