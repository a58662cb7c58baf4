"""Samplers of ComfyUI under Apply PipeFusion, and patches. Run by serve.py."""

import logging
import time
import warnings
from functools import partial

from boot import BUNDLED, Results, comfy, difference, ksampler, node, nodes, parallel, sequence, torch

STEPS = 3
PATCH_STEPS = 8


class Warnings(logging.Handler):
    """Collects all warnings but Python's about ComfyUI's own code and torchsde's. With one of ours a run was exact."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        warnings.filterwarnings("ignore", module=r"(comfy|torchsde)\.")
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(results: Results, names: list[str], patched: list[str]) -> None:
    """`names`: samplers. `patched`: runs in displaced patches, beside those that others are held against."""
    logging.getLogger().addHandler(told := Warnings())
    prompts = [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    plain = parallel(BUNDLED)
    banded, warm = node("ApplyPipeFusion", plain, 3, 1, True), node("ApplyPipeFusion", plain, 3, 1000, True)
    empty = torch.zeros(1, 16, 16, 16)
    picture = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(1)) * 0.5

    def every_way(sampler: str) -> dict:
        started = time.perf_counter()
        told.texts.clear()
        exact = ksampler(plain, prompts, empty, sampler, STEPS)
        plain_told = list(told.texts)
        told.texts.clear()
        stale = ksampler(banded, prompts, empty, sampler, STEPS)
        said = list(told.texts)
        warmed = ksampler(warm, prompts, empty, sampler, STEPS)
        return {
            "finite": bool(exact.isfinite().all() and stale.isfinite().all()),
            "plain warnings": plain_told,
            "warnings": said,
            "warm warnings": told.texts[len(said) :],
            "warm": difference(exact, warmed),
            "stale": difference(exact, stale),
            "seconds": time.perf_counter() - started,
        }

    results.case("all samplers", lambda: comfy.samplers.SAMPLER_NAMES)
    for sampler in names:
        results.case(f"sampler {sampler}", partial(every_way, sampler))

    def against_warm(run) -> dict:
        """`run` pipelined, repeated, and warmed up throughout, against the plain parallel MODEL."""
        exact = run(plain)
        told.texts.clear()
        first, second = run(banded), run(banded)
        return {
            "finite": bool(first.isfinite().all()),
            "warnings": list(told.texts),
            "repeat": difference(first, second),
            "warm": difference(exact, run(warm)),
            "stale": difference(exact, first),
        }

    for sampler in ("euler", "dpmpp_sde", "euler_ancestral"):
        results.case(
            f"repeat {sampler}", partial(against_warm, partial(_ksampler, prompts=prompts, latent=empty, sampler=sampler))
        )
    results.case(
        "scheduler karras", partial(against_warm, partial(_ksampler, prompts=prompts, latent=empty, scheduler="karras"))
    )
    results.case("denoise 0.5", partial(against_warm, partial(_ksampler, prompts=prompts, latent=picture, denoise=0.5)))
    results.case("batch 2", partial(against_warm, partial(_ksampler, prompts=prompts, latent=torch.zeros(2, 16, 16, 16))))
    results.case("odd size", partial(against_warm, partial(_ksampler, prompts=prompts, latent=torch.zeros(1, 16, 15, 13))))

    mask = torch.zeros(1, 1, 16, 16)
    mask[..., 4:10, 3:12] = 1
    inpaint = {"samples": picture, "noise_mask": mask}
    results.case("inpaint", partial(against_warm, partial(_ksampler, prompts=prompts, latent=inpaint)))
    results.case("inpaint ddim", partial(against_warm, partial(_ksampler, prompts=prompts, latent=inpaint, sampler="ddim")))
    results.case("inpaint keeps", lambda: _outside(ksampler(banded, prompts, inpaint, steps=STEPS), picture, mask))

    for guider in ("BasicGuider", "CFGGuider"):
        results.case(
            f"guider {guider}", partial(against_warm, partial(_custom, guider=guider, prompts=prompts, latent=empty))
        )

    narrow = [[[entry[0][..., :-8], entry[1]] for entry in prompt] for prompt in prompts]
    results.case("refusal text width", partial(ksampler, plain, narrow, empty))
    results.case("refusal text width in bands", partial(ksampler, banded, narrow, empty))
    results.case("after the refusals", partial(against_warm, partial(_ksampler, prompts=prompts, latent=empty)))

    # Patches load the model again, so what the pipeline gives for them comes first. Bands of one size, whatever the ranks
    # measure: how far old keys are from exact depends on them.
    area = [node("ConditioningSetArea", prompts[0], 64, 128, 0, 0, 1.0), prompts[1]]
    runs = {
        "euler": partial(ksampler, prompts=prompts, latent=empty, steps=PATCH_STEPS),
        "euler cfg 1": partial(ksampler, prompts=prompts, latent=empty, steps=PATCH_STEPS, cfg=1.0),
        "euler_ancestral": partial(ksampler, prompts=prompts, latent=empty, sampler="euler_ancestral", steps=PATCH_STEPS),
        "dpm_adaptive": partial(ksampler, prompts=prompts, latent=empty, sampler="dpm_adaptive"),
        "odd size": partial(ksampler, prompts=prompts, latent=torch.zeros(1, 16, 15, 13), steps=PATCH_STEPS),
        "guider BasicGuider": partial(_custom, guider="BasicGuider", prompts=prompts, latent=empty, steps=PATCH_STEPS),
        "area": partial(ksampler, prompts=area, latent=empty, steps=PATCH_STEPS),
    }
    runs = {name: run for name, run in runs.items() if name in ("euler", "area", *patched)}
    with torch.inference_mode():
        exact = {name: run(plain) for name, run in runs.items()}
    displaced, warm, naive = (
        parallel(BUNDLED, pipe=1, config=sequence(1, 1, *patches), stage_split="even")
        for patches in (("displaced", 2), ("displaced", 2, 1000), ("naive", 2))
    )

    def in_patches(model, name: str, times: int = 2) -> dict:
        """On a MODEL with patches, repeated, against the plain parallel MODEL."""
        told.texts.clear()
        first, *others = (runs[name](model) for _ in range(times))
        return {
            "finite": bool(first.isfinite().all()),
            "warnings": list(told.texts),
            "repeat": max((difference(first, other) for other in others), default=None),
            "relative": float((first - exact[name]).norm() / exact[name].norm()),
        }

    def reported(model, texts, warmup_steps: int) -> dict:
        """PipeFusion Sampler on a MODEL with patches: its report, and how far it is from KSampler on this MODEL."""
        sampler = nodes.NODE_CLASS_MAPPINGS["PipeFusionSampler"]()
        settings = (42, PATCH_STEPS, 3.0, "euler", "simple", *texts, {"samples": empty}, 1.0, 0, warmup_steps, True)
        latent, report = sampler.sample(model, *settings)
        own = ksampler(model, texts, empty, steps=PATCH_STEPS)
        return {"report": report, "difference": difference(own, latent["samples"])}

    for name in runs:
        results.case(f"displaced {name}", partial(in_patches, displaced, name))
        results.case(f"displaced, all steps warm-up {name}", partial(in_patches, warm, name, times=1))
    results.case("displaced report", partial(reported, displaced, prompts, 1))
    results.case("displaced report, 3 warm-up steps", partial(reported, displaced, prompts, 3))
    results.case("displaced report, area", partial(reported, displaced, area, 1))
    results.case(
        "displaced, Apply PipeFusion",
        partial(in_patches, node("ApplyPipeFusion", displaced, 0, 1000, True), "euler", times=1),
    )
    results.case("displaced refusal text width", partial(ksampler, displaced, narrow, empty))
    results.case("displaced after the refusal", partial(in_patches, displaced, "euler"))
    results.case("naive euler", partial(in_patches, naive, "euler"))
    results.case("naive report", partial(reported, naive, prompts, 1))


def _ksampler(model, prompts, latent, **settings) -> torch.Tensor:
    return ksampler(model, prompts, latent, steps=STEPS, **settings)


def _outside(result: torch.Tensor, picture: torch.Tensor, mask: torch.Tensor) -> float:
    """How much inpainting changed what it was to keep."""
    return difference(result * (1 - mask), picture * (1 - mask))


def _custom(model, guider: str, prompts, latent, steps=STEPS) -> torch.Tensor:
    """SamplerCustomAdvanced, by what its nodes call."""
    if guider == "BasicGuider":
        from comfy_extras.nodes_custom_sampler import Guider_Basic

        chosen = Guider_Basic(model)
        chosen.set_conds(prompts[0])
    else:
        chosen = comfy.samplers.CFGGuider(model)
        chosen.set_conds(*prompts)
        chosen.set_cfg(3.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(42))
    return chosen.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, seed=42)
