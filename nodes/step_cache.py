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
        "Predicts model calls from earlier ones if the expected error is small. For a MODEL from Parallel DiT Loader or "
        "Parallelize Model, in every mode, with or without PipeFusion."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": link(
                    "MODEL",
                    "From Parallel DiT Loader or Parallelize Model. LoRA loaders and Apply PipeFusion may come before "
                    "or after.",
                ),
                "threshold": threshold(
                    0.04,
                    "Largest expected error of a predicted call, as a share of the model's output. A higher value is "
                    "faster, but further from the uncached image. 0 turns the cache off. With samplers that draw noise "
                    "between steps, values below 0.5 skip little.",
                ),
                "start_percent": share(0.0, "Every call in this first part of the sampling is computed."),
                "end_percent": share(
                    1.0, "Every call after this part of the sampling is computed. The last step is always computed."
                ),
            }
        }

    def apply(self, model, threshold, start_percent, end_percent):
        remote_stub(model)
        return (with_step_cache(model, CacheSettings(threshold, start_percent, end_percent)),)
