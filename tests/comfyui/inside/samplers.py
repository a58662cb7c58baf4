"""Samplers of ComfyUI and of other packs under Apply PipeFusion, and patches. Run by serve.py."""

from functools import partial

from boot import (
    BUNDLED,
    Results,
    Told,
    comfy,
    difference,
    ksampler,
    node,
    outputs_of,
    parallel,
    sequence,
    torch,
    whole_because,
)
from comfy_extras.nodes_advanced_samplers import SamplerEulerCFGpp

STEPS = 3
PATCH_STEPS = 8


def detail_daemon_sampler(model, x, sigmas, *, dds_wrapped_sampler, **named):
    """As Detail Daemon's: the model is told of less noise than there is."""

    def told_of_less(x, sigma, **extra_args):
        return model(x, sigma * (0.9 if float(sigma.max()) < float(sigmas[1]) else 1.0), **extra_args)

    told_of_less.inner_model, told_of_less.sigmas = model.inner_model, model.sigmas
    return dds_wrapped_sampler.sampler_function(told_of_less, x, sigmas, **named, **dds_wrapped_sampler.extra_options)


detail_daemon_sampler.__module__ = "detail_daemon_node"


def wrapping(sampler: comfy.samplers.KSAMPLER) -> comfy.samplers.KSAMPLER:
    return comfy.samplers.KSAMPLER(detail_daemon_sampler, {"dds_wrapped_sampler": sampler})


def main(results: Results, names: list[str] | None) -> None:
    """`names`: samplers, and further runs. None: all samplers of this ComfyUI alone."""
    told = Told()
    prompts = [node("QuickstartPrompt", text) for text in ("3 1 4 1", "")]
    plain = parallel(BUNDLED)
    banded, warm = node("ApplyPipeFusion", plain, 3, 1, True), node("ApplyPipeFusion", plain, 3, 1000, True)
    empty = torch.zeros(1, 16, 16, 16)
    picture = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(1)) * 0.5

    def every_way(sampler: str) -> dict:
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
        }

    for sampler in comfy.samplers.SAMPLER_NAMES if names is None else names:
        results.case(f"sampler {sampler}", partial(every_way, sampler))
    if names is None:
        return

    noise = torch.randn(empty.shape, generator=torch.Generator().manual_seed(1))
    sigmas = comfy.samplers.calculate_sigmas(plain.get_model_object("model_sampling"), "simple", STEPS)

    def sampled(model, sampler) -> torch.Tensor:
        return comfy.sample.sample_custom(model, noise, 3.0, sampler, sigmas, *prompts, empty, disable_pbar=True, seed=5)

    def of_another(sampler) -> dict:
        exact = sampled(plain, sampler)
        found = {"warm": difference(exact, sampled(warm, sampler)), "stale": difference(exact, sampled(banded, sampler))}
        return found | {"reason": whole_because(banded)[0]}

    ancestral = comfy.samplers.sampler_object("euler_ancestral").sampler_function
    others = {
        "wrapped euler_ancestral": wrapping(comfy.samplers.ksampler("euler_ancestral")),
        "Euler CFG++, alternative": SamplerEulerCFGpp.execute("alternative").args[0],
        "partial euler_ancestral": comfy.samplers.KSAMPLER(partial(ancestral, eta=0.6)),
    }
    for name, sampler in others.items():
        results.case(name, partial(of_another, sampler))

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

    run = partial(_ksampler, prompts=prompts, latent=empty)
    results.case("euler_ancestral", partial(against_warm, partial(run, sampler="euler_ancestral")))
    results.case("odd size", partial(against_warm, partial(run, latent=torch.zeros(1, 16, 15, 13))))

    mask = torch.zeros(1, 1, 16, 16)
    mask[..., 4:10, 3:12] = 1
    inpaint = {"samples": picture, "noise_mask": mask}
    results.case("inpaint", partial(against_warm, partial(run, latent=inpaint)))
    results.case("inpaint ddim", partial(against_warm, partial(run, latent=inpaint, sampler="ddim")))
    results.case("guider BasicGuider", partial(against_warm, partial(_custom, prompts=prompts, latent=empty)))

    narrow = [[[entry[0][..., :-8], entry[1]] for entry in prompt] for prompt in prompts]
    results.case("refusal text width", partial(ksampler, plain, narrow, empty))
    results.case("refusal text width in bands", partial(ksampler, banded, narrow, empty))
    results.case("after the refusals", partial(against_warm, run))

    # Patches load the model again, so what the pipeline gives for them comes first. Bands of one size, whatever the ranks
    # measure: how far old keys are from exact depends on them.
    area = [node("ConditioningSetArea", prompts[0], 64, 128, 0, 0, 1.0), prompts[1]]
    runs = {
        "euler": partial(ksampler, prompts=prompts, latent=empty, steps=PATCH_STEPS),
        "area": partial(ksampler, prompts=area, latent=empty, steps=PATCH_STEPS),
    }
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

    def reported(model, texts) -> dict:
        """PipeFusion Sampler on a MODEL with patches: its report, and how far it is from KSampler on this MODEL."""
        settings = (42, PATCH_STEPS, 3.0, "euler", "simple", *texts, {"samples": empty}, 1.0, 0, 1, True)
        latent, report = outputs_of("PipeFusionSampler", model, *settings)
        own = ksampler(model, texts, empty, steps=PATCH_STEPS)
        return {"report": report, "difference": difference(own, latent["samples"])}

    for name in runs:
        results.case(f"displaced {name}", partial(in_patches, displaced, name))
        results.case(f"displaced, all steps warm-up {name}", partial(in_patches, warm, name, times=1))
    results.case("displaced report", partial(reported, displaced, prompts))
    results.case("displaced report, area", partial(reported, displaced, area))
    results.case(
        "displaced, Apply PipeFusion",
        partial(in_patches, node("ApplyPipeFusion", displaced, 0, 1000, True), "euler", times=1),
    )
    results.case("displaced refusal text width", partial(ksampler, displaced, narrow, empty))
    results.case("displaced after the refusal", partial(in_patches, displaced, "euler"))
    results.case("naive euler", partial(in_patches, naive, "euler"))
    results.case("naive report", partial(reported, naive, prompts))


def _ksampler(model, prompts, latent, **settings) -> torch.Tensor:
    return ksampler(model, prompts, latent, steps=STEPS, **settings)


def _custom(model, prompts, latent) -> torch.Tensor:
    """SamplerCustomAdvanced with BasicGuider, by what its nodes call."""
    from comfy_extras.nodes_custom_sampler import Guider_Basic

    chosen = Guider_Basic(model)
    chosen.set_conds(prompts[0])
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(42))
    return chosen.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, seed=42)
