"""The step cache of a MODEL. Its settings are in transformer_options; its state lives as long as one sampling run."""

from dataclasses import dataclass
from typing import Any

import comfy.model_patcher
import comfy.patcher_extension
import torch

from parallel_backend.client.step_cache import StepCache
from parallel_backend.own_class.calls.patching import Latents

from .run_shapes import PART, Shapes, is_for_all, shapes_of_run

CACHE_KEY = "parallel_dit_step_cache"
"""Key in `transformer_options` under which a MODEL carries its CacheSettings."""
HOOKED = "step cache: every call is computed, because the conditioning has LoRAs of its own (hooks)"
KIND = comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE


@dataclass(frozen=True)
class CacheSettings:
    """The widgets of Parallel Step Cache."""

    threshold: float
    start_percent: float = 0.0
    end_percent: float = 1.0


class SamplingCache:
    """Step cache of one sampling run, whole or in bands. `shapes`: of the run's latents; None until its sampler begins. The
    first call for a part of the latents ends all forecasts, because the cache cannot distinguish the parts' histories."""

    def __init__(self, settings: CacheSettings, model_sampling: Any):
        self.settings = settings
        self._from, self._to = (
            float(model_sampling.percent_to_sigma(percent)) for percent in (settings.start_percent, settings.end_percent)
        )
        self.cache = StepCache(settings.threshold)
        self.shapes: Shapes | None = None
        self._off = False

    def restart(self, bands: int = 1) -> None:
        """Begin with an empty cache, for calls in `bands` bands. Drops the forecasts of an earlier attempt."""
        self.cache = StepCache(self.settings.threshold, bands)

    @property
    def for_calls(self) -> StepCache | None:
        """The cache for calls outside of a run in bands. None: forecasts have ended."""
        return None if self._off else self.cache

    def see(self, latents: Latents, options: dict[str, Any]) -> None:
        """Record a call outside of a run in bands, before it is made. `options`: its transformer_options."""
        self._off |= self.shapes is None or not is_for_all(latents, options, self.shapes)

    def report(self) -> str:
        """Text for the user: how many model calls were computed, or why the cache was not used."""
        return f"step cache: not used, because {PART}" if self._off else self.cache.summary

    def may_forecast(self, options: dict[str, Any]) -> bool:
        """Whether a call with these transformer_options may be forecast: within the percents and not in the last step."""
        if self._off:
            return False
        sigma, steps = float(options["sigmas"].max()), options.get("sample_sigmas")
        last_step = steps is not None and len(steps) > 1 and sigma <= float(steps[-2])
        return self._to < sigma <= self._from and not last_step


def with_step_cache(model: comfy.model_patcher.ModelPatcher, settings: CacheSettings) -> comfy.model_patcher.ModelPatcher:
    """Return a clone of the MODEL with a step cache, or without one if the threshold is 0."""
    patched = model.clone()
    options = patched.model_options["transformer_options"]
    patched.remove_wrappers_with_key(KIND, CACHE_KEY)
    if settings.threshold > 0:
        options[CACHE_KEY] = settings
        patched.add_wrapper_with_key(KIND, CACHE_KEY, note_shapes)
    else:
        options.pop(CACHE_KEY, None)
    return patched


def note_shapes(executor, guider, sigmas, extra_args, callback, noise: torch.Tensor, *arguments) -> torch.Tensor:
    """ComfyUI's SAMPLER_SAMPLE wrapper, which sets the cache's `shapes`. Arguments and result are those of
    `sampler.sample`."""
    model = guider.inner_model
    on_ranks = getattr(model.diffusion_model, "on_ranks", False)  # False: the native one of a guider's two MODELs
    if on_ranks and (cache := model.diffusion_model.run.cache) is not None:
        cache.shapes = shapes_of_run(model, noise)
    return executor(guider, sigmas, extra_args, callback, noise, *arguments)


def begin_cache(model: comfy.model_patcher.ModelPatcher) -> SamplingCache | None:
    """The cache for a new sampling run of this MODEL. None if it has no cache, or cannot use it in this run (HOOKED)."""
    settings = model.model_options["transformer_options"].get(CACHE_KEY)
    if settings is None:
        return None
    if model.hook_patches:  # the same prompt may be evaluated with a LoRA and without, at changing strengths
        return None
    return SamplingCache(settings, model.get_model_object("model_sampling"))
