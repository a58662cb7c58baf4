"""The step cache of a MODEL. Its settings travel in transformer_options; its state lives as long as one sampling run."""

from dataclasses import dataclass
from typing import Any

import comfy.model_patcher

from parallel_backend.client.step_cache import StepCache

from ..ui.node_text import say

CACHE_KEY = "parallel_dit_step_cache"
"""Key in `transformer_options` under which a MODEL carries its CacheSettings."""


@dataclass(frozen=True)
class CacheSettings:
    """The widgets of Parallel Step Cache."""

    threshold: float
    start_percent: float = 0.0
    end_percent: float = 1.0


class SamplingCache:
    """Step cache of one sampling run, whole or in bands."""

    def __init__(self, settings: CacheSettings, model_sampling: Any):
        self.settings = settings
        self._from, self._to = (
            float(model_sampling.percent_to_sigma(percent)) for percent in (settings.start_percent, settings.end_percent)
        )
        self.cache = StepCache(settings.threshold)
        self._reported = False

    def restart(self, bands: int = 1) -> StepCache:
        """A new, empty cache, for calls in `bands` bands. What an attempt before has kept is forgotten."""
        self.cache = StepCache(self.settings.threshold, bands)
        return self.cache

    def report(self) -> str:
        """Summary in words. Whoever asks for it shows it: `tell` does not any more."""
        self._reported = True
        return self.cache.summary

    def may_forecast(self, options: dict[str, Any]) -> bool:
        """A call with these transformer_options is within the percents, and not in the last step."""
        sigma, steps = float(options["sigmas"].max()), options.get("sample_sigmas")
        last_step = steps is not None and len(steps) > 1 and sigma <= float(steps[-2])
        return self._to < sigma <= self._from and not last_step

    def tell(self) -> None:
        """Show the summary on the sampler's node, unless `report` was asked for it."""
        if not self._reported:
            say(f"Parallel DiT: {self.cache.summary}")


def with_step_cache(model: comfy.model_patcher.ModelPatcher, settings: CacheSettings) -> comfy.model_patcher.ModelPatcher:
    """A clone of the MODEL with a step cache, or without one where the threshold is 0."""
    patched = model.clone()
    options = patched.model_options["transformer_options"]
    if settings.threshold > 0:
        options[CACHE_KEY] = settings
    else:
        options.pop(CACHE_KEY, None)
    return patched


def begin_cache(model: comfy.model_patcher.ModelPatcher) -> SamplingCache | None:
    """Cache for a sampling run of this MODEL that begins. None: the MODEL has no step cache."""
    settings = model.model_options["transformer_options"].get(CACHE_KEY)
    return None if settings is None else SamplingCache(settings, model.get_model_object("model_sampling"))
