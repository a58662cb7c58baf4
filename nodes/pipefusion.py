"""Apply PipeFusion and PipeFusion Sampler."""

import comfy.patcher_extension
import comfy.samplers

from .model.step_cache import CacheSettings, with_step_cache
from .sampling.pipefusion import apply_pipefusion
from .ui.input_checks import validate
from .ui.widgets import CATEGORY, cfg_scale, threshold

SETTINGS = {
    "num_pipeline_patch": (
        "INT",
        {
            "default": 0,
            "min": 0,
            "max": 64,
            "tooltip": "Bands that the latent is cut into. 0 chooses by measured speed: one, two or four per stage. More "
            "bands hide transfers better, fewer stay closer to the unpipelined picture.",
        },
    ),
    "warmup_steps": (
        "INT",
        {
            "default": 1,
            "min": 0,
            "max": 10000,
            "tooltip": "First steps that run exact. After them each band sees the other bands as they were one step ago. As "
            "many as steps: all exact and no speed-up.",
        },
    ),
    "overlap": ("BOOLEAN", {"default": True, "tooltip": "Let transfers between stages run while they compute."}),
}
OPTIONAL_SETTINGS = {
    "extrapolate": (
        "BOOLEAN",
        {
            "default": True,
            "tooltip": "Move the other bands' keys, one step old, on to the present step: much closer to the unpipelined "
            "picture, for twice the memory of the K/V buffers. Only under samplers that draw no noise between steps.",
        },
    ),
}


@validate()
class ApplyPipeFusion:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    DESCRIPTION = (
        "Makes every native sampler pipeline its steps over the stages of a MODEL from Parallel DiT Loader or Parallelize "
        "Model."
    )

    @classmethod
    def INPUT_TYPES(cls):
        model = ("MODEL", {"tooltip": "From Parallel DiT Loader or Parallelize Model; LoRA loaders may stand between."})
        return {"required": {"model": model, **SETTINGS}, "optional": OPTIONAL_SETTINGS}

    def apply(self, model, num_pipeline_patch, warmup_steps, overlap, extrapolate=True):
        return (apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate)[0],)


@validate()
class PipeFusionSampler:
    CATEGORY = CATEGORY
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("LATENT", "report")
    FUNCTION = "sample"
    DESCRIPTION = "KSampler with PipeFusion. Equal to Apply PipeFusion and KSampler; also reports what the ranks did."

    @classmethod
    def INPUT_TYPES(cls):
        sampler = comfy.samplers.KSampler
        return {
            "required": {
                "model": (
                    "MODEL",
                    {"tooltip": "From Parallel DiT Loader or Parallelize Model; LoRA loaders may stand between."},
                ),
                "seed": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": 0xFFFFFFFFFFFFFFFF,
                        "control_after_generate": True,
                        "tooltip": "The noise's random seed.",
                    },
                ),
                "steps": ("INT", {"default": 20, "min": 1, "max": 10000, "tooltip": "Denoising steps."}),
                "cfg": cfg_scale(
                    "Classifier-free guidance; 1 for distilled models such as Flux, which then run one prompt only."
                ),
                "sampler_name": (sampler.SAMPLERS, {"default": "euler", "tooltip": "Any of ComfyUI's samplers."}),
                "scheduler": (sampler.SCHEDULERS, {"default": "simple", "tooltip": "How the noise level falls."}),
                "positive": ("CONDITIONING", {"tooltip": "What the picture should show."}),
                "negative": ("CONDITIONING", {"tooltip": "What it should not show; unused at cfg 1."}),
                "latent_image": ("LATENT", {"tooltip": "The latent to denoise."}),
                "denoise": (
                    "FLOAT",
                    {
                        "default": 1.0,
                        "min": 0.0,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "Below 1 the input latent keeps its structure.",
                    },
                ),
                **SETTINGS,
            },
            "optional": {
                **OPTIONAL_SETTINGS,
                "step_cache": threshold(
                    0.0,
                    "Above 0: does not compute steps whose result can be told from the steps before, as long as they are "
                    "expected to be wrong by no more than this share (0.04 is good). 0: as the MODEL has it.",
                ),
            },
        }

    def sample(
        self,
        model,
        seed,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        latent_image,
        denoise,
        num_pipeline_patch,
        warmup_steps,
        overlap,
        extrapolate=True,
        step_cache=0.0,
    ):
        from nodes import common_ksampler  # ComfyUI's nodes.py; this package is `.nodes` of the pack

        patched, wrapper = apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate)
        if step_cache > 0:
            patched = with_step_cache(patched, CacheSettings(step_cache))
        latent = common_ksampler(
            patched, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )[0]
        return (latent, str(wrapper.last))
