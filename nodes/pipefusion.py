"""Apply PipeFusion and PipeFusion Sampler."""

import comfy.samplers

from .model.run.step_cache import CacheSettings, with_step_cache
from .sampling.pipefusion import apply_pipefusion
from .ui.input_checks import validate
from .ui.other_nodes import COMFYUI
from .ui.widgets import CATEGORY, cfg_scale, choice, flag, link, share, threshold, whole_number

SETTINGS = {
    "num_pipeline_patch": whole_number(
        0,
        0,
        64,
        "Bands that the latent is cut into. 0 chooses by measured speed: one, two or four per stage. More bands hide "
        "transfers better, fewer stay closer to the unpipelined picture.",
    ),
    "warmup_steps": whole_number(
        1,
        0,
        10000,
        "First steps that run exact. After them each band sees the other bands as they were one step ago. As many as steps: "
        "all exact and no speed-up.",
    ),
    "overlap": flag(True, "Let transfers between stages run while they compute."),
}
OPTIONAL_SETTINGS = {
    "extrapolate": flag(
        True,
        "Move the other bands' keys, one step old, on to the present step: much closer to the unpipelined picture, for "
        "twice the memory of the K/V buffers. Only under samplers that draw no noise between steps.",
    )
}
MODEL = link("MODEL", "From Parallel DiT Loader or Parallelize Model; LoRA loaders may stand between.")


@validate()
class ApplyPipeFusion:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "xdit", "xfuser", "pipeline parallel", "distributed")
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    DESCRIPTION = (
        "Makes every native sampler pipeline its steps over the stages of a MODEL from Parallel DiT Loader or Parallelize "
        "Model."
    )

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": MODEL, **SETTINGS}, "optional": OPTIONAL_SETTINGS}

    def apply(self, model, num_pipeline_patch, warmup_steps, overlap, extrapolate=True):
        return (apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate)[0],)


@validate()
class PipeFusionSampler:
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ("multi gpu", "multigpu", "xdit", "xfuser", "pipeline parallel", "distributed", "ksampler", "sample")
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("LATENT", "report")
    FUNCTION = "sample"
    DESCRIPTION = "KSampler with PipeFusion. Equal to Apply PipeFusion and KSampler; also reports what the ranks did."

    @classmethod
    def INPUT_TYPES(cls):
        sampler = comfy.samplers.KSampler
        return {
            "required": {
                "model": MODEL,
                "seed": whole_number(0, 0, 0xFFFFFFFFFFFFFFFF, "The noise's random seed.", control_after_generate=True),
                "steps": whole_number(20, 1, 10000, "Denoising steps."),
                "cfg": cfg_scale(
                    "Classifier-free guidance; 1 for distilled models such as Flux, which then run one prompt only."
                ),
                "sampler_name": choice(sampler.SAMPLERS, "euler", "Any of ComfyUI's samplers."),
                "scheduler": choice(sampler.SCHEDULERS, "simple", "How the noise level falls."),
                "positive": link("CONDITIONING", "What the picture should show."),
                "negative": link("CONDITIONING", "What it should not show; unused at cfg 1."),
                "latent_image": link("LATENT", "The latent to denoise."),
                "denoise": share(1.0, "Below 1 the input latent keeps its structure."),
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
        patched, wrapper = apply_pipefusion(model, num_pipeline_patch, warmup_steps, overlap, extrapolate)
        if step_cache > 0:
            patched = with_step_cache(patched, CacheSettings(step_cache))
        latent = COMFYUI.common_ksampler(
            patched, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )[0]
        return (latent, str(wrapper.last))
