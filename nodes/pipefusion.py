"""Apply PipeFusion and PipeFusion Sampler."""

import comfy.samplers

from .model.run.step_cache import CacheSettings, with_step_cache
from .sampling.pipefusion import apply_pipefusion
from .ui.input_checks import validate
from .ui.other_nodes import COMFYUI
from .ui.widgets import CATEGORY, cfg_scale, choice, decibels, flag, link, share, threshold, whole_number

SETTINGS = {
    "num_pipeline_patch": whole_number(
        0,
        0,
        64,
        "Number of patches that the latent is cut into. 0 chooses one, two or four per stage by measured speed. More "
        "patches hide transfers better. Fewer stay closer to the image of one GPU.",
    ),
    "warmup_steps": whole_number(
        1,
        0,
        10000,
        "Number of first steps that are exact. After these steps each patch sees the other patches as they were one step "
        "ago. If it equals steps, all steps are exact and there is no speed-up.",
    ),
    "overlap": flag(True, "Transfers between stages run during computation."),
}
OPTIONAL_SETTINGS = {
    "extrapolate": flag(
        True,
        "Predicts the other patches' keys and values, which are one step old. Much closer to the image of one GPU, but "
        "the K/V buffers take twice the memory. Works only with samplers that draw no noise between steps.",
    ),
}
CLOSENESS = {
    "min_closeness": decibels(
        "Above 0: how close the latent must be to that of one GPU, in dB (30 is close, 40 very close). Steps beyond "
        "warmup_steps stay exact until that is expected. 0: warmup_steps alone decides.",
    )
}
"""The last input of both nodes, because saved workflows keep values by position."""
MODEL = link("MODEL", "From Parallel DiT Loader or Parallelize Model. LoRA loaders may be in between.")


@validate()
class ApplyPipeFusion:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "xdit", "xfuser", "pipeline parallel", "distributed")
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    DESCRIPTION = (
        "Pipelines the steps of any sampler over the stages of a MODEL from Parallel DiT Loader or Parallelize Model."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": MODEL, **SETTINGS}, "optional": {**OPTIONAL_SETTINGS, **CLOSENESS}}

    def apply(self, model, num_pipeline_patch, warmup_steps, overlap, extrapolate=True, min_closeness=0.0):
        return (apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate, min_closeness)[0],)


@validate()
class PipeFusionSampler:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "xdit", "xfuser", "pipeline parallel", "distributed", "ksampler", "sample")
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("LATENT", "report")
    FUNCTION = "sample"
    DESCRIPTION = (
        "KSampler with PipeFusion. It gives the same image as Apply PipeFusion with KSampler, and also reports what the "
        "ranks did."
    )

    @classmethod
    def INPUT_TYPES(cls):
        sampler = comfy.samplers.KSampler
        return {
            "required": {
                "model": MODEL,
                "seed": whole_number(0, 0, 0xFFFFFFFFFFFFFFFF, "The random seed of the noise.", control_after_generate=True),
                "steps": whole_number(20, 1, 10000, "Denoising steps."),
                "cfg": cfg_scale(
                    "Classifier-free guidance. Use 1 for distilled models such as Flux: they then run one prompt only."
                ),
                "sampler_name": choice(sampler.SAMPLERS, "euler", "Any of ComfyUI's samplers."),
                "scheduler": choice(sampler.SCHEDULERS, "simple", "How the noise level falls."),
                "positive": link("CONDITIONING", "What the image should show."),
                "negative": link("CONDITIONING", "What the image should not show. Unused at cfg 1."),
                "latent_image": link("LATENT", "The latent to denoise."),
                "denoise": share(1.0, "Below 1, the result keeps the structure of the input latent."),
                **SETTINGS,
            },
            "optional": {
                **OPTIONAL_SETTINGS,
                "step_cache": threshold(
                    0.0,
                    "Above 0: predicts steps from earlier ones if the expected error is at most this share (0.04 is "
                    "good). 0: as the MODEL has it.",
                ),
                **CLOSENESS,
            },
        }

    def sample(
        self,
        model,
        latent_image,
        num_pipeline_patch,
        warmup_steps,
        overlap,
        extrapolate=True,
        step_cache=0.0,
        min_closeness=0.0,
        **ksampler,
    ):
        """`ksampler`: KSampler's other inputs, under its names."""
        patched, wrapper = apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate, min_closeness)
        if step_cache > 0:
            patched = with_step_cache(patched, CacheSettings(step_cache))
        latent = COMFYUI.common_ksampler(patched, latent=latent_image, **ksampler)[0]
        return (latent, str(wrapper.last))
