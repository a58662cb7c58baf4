"""Parallel Step Cache."""

from .model.call.diffusion_model import remote_stub
from .model.run.step_cache import CacheSettings, with_step_cache
from .ui.input_checks import validate
from .ui.widgets import CATEGORY, link, share, threshold


@validate()
class ParallelStepCache:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "teacache", "first block cache", "easycache")
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    DESCRIPTION = (
        "Does not compute model calls whose result can be told from the calls before. For a MODEL from Parallel DiT Loader "
        "or Parallelize Model, in every mode, with or without PipeFusion."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": link(
                    "MODEL",
                    "From Parallel DiT Loader or Parallelize Model; LoRA loaders and Apply PipeFusion may stand before or "
                    "after.",
                ),
                "threshold": threshold(
                    0.04,
                    "How wrong calls may be that are not computed, as a share of the model's output. More is faster and "
                    "further from the uncached picture; 0 turns the cache off. Samplers that draw noise between steps skip "
                    "little below 0.5.",
                ),
                "start_percent": share(0.0, "Compute every call of this first part of the sampling."),
                "end_percent": share(1.0, "Compute every call after this part; the last step always is."),
            }
        }

    def apply(self, model, threshold, start_percent, end_percent):
        remote_stub(model)
        return (with_step_cache(model, CacheSettings(threshold, start_percent, end_percent)),)
