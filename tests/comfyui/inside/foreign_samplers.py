"""Samplers of ComfyUI's nodes and of other packs under Apply PipeFusion, against the MODEL without it. Run by serve.py."""

import functools

from boot import Results, comfy, difference, node, parallel, random_prompts, torch, whole_because
from comfy_extras.nodes_advanced_samplers import SamplerEulerCFGpp

FILE = "tiny.safetensors"
STEPS = 4


def detail_daemon_sampler(model, x, sigmas, *, dds_wrapped_sampler, **named):
    """As Detail Daemon's: the model is told of less noise than there is."""

    def told_of_less(x, sigma, **extra_args):
        return model(x, sigma * (0.9 if float(sigma.max()) < float(sigmas[1]) else 1.0), **extra_args)

    told_of_less.inner_model, told_of_less.sigmas = model.inner_model, model.sigmas
    return dds_wrapped_sampler.sampler_function(told_of_less, x, sigmas, **named, **dds_wrapped_sampler.extra_options)


detail_daemon_sampler.__module__ = "detail_daemon_node"


def shifted(offset, model, x, sigmas, **named):
    """As a preset of bleh's: a function that has no name, since it is a partial one."""
    return comfy.samplers.sampler_object("euler").sampler_function(model, x + offset, sigmas, **named)


class Centred:
    """A sampler that looks at the whole latent, and is no function."""

    def __call__(self, model, x, sigmas, **named):
        return comfy.samplers.sampler_object("euler").sampler_function(model, x - x.mean(), sigmas, **named)


def wrapping(inner: str, **options) -> comfy.samplers.KSAMPLER:
    sampler = comfy.samplers.ksampler(inner, options)
    return comfy.samplers.KSAMPLER(detail_daemon_sampler, {"dds_wrapped_sampler": sampler})


def named_like_comfyui(function) -> functools.partial:
    """As bleh's wrappers: a partial function that says it is ComfyUI's own."""
    return functools.update_wrapper(
        functools.partial(function, 0.1), comfy.samplers.sampler_object("euler").sampler_function
    )


def main(results: Results) -> None:
    plain, (positive, negative) = parallel(FILE), random_prompts(9, 9)
    latent = torch.zeros(1, 16, 16, 16)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    banded, warm = node("ApplyPipeFusion", plain, 3, 1, True), node("ApplyPipeFusion", plain, 3, 1000, True)
    sigmas = comfy.samplers.calculate_sigmas(plain.get_model_object("model_sampling"), "simple", STEPS)

    def run(model, sampler) -> torch.Tensor:
        texts = positive, negative
        return comfy.sample.sample_custom(model, noise, 3.0, sampler, sigmas, *texts, latent, disable_pbar=True, seed=5)

    def compare(sampler) -> dict:
        exact = run(plain, sampler)
        found = {"warm": difference(exact, run(warm, sampler)), "stale": difference(exact, run(banded, sampler))}
        return found | {"reason": whole_because(banded)[0]}

    def draw(sigma, sigma_next):
        return noise

    samplers = {
        "wrapped euler_ancestral": wrapping("euler_ancestral"),
        "Euler CFG++, alternative": SamplerEulerCFGpp.execute("alternative").args[0],
        "wrapped, with noise of its own": wrapping("euler_ancestral", noise_sampler=draw),
        "partial euler_ancestral": comfy.samplers.KSAMPLER(
            functools.partial(comfy.samplers.sampler_object("euler_ancestral").sampler_function, eta=0.6)
        ),
        "partial in ComfyUI's name": comfy.samplers.KSAMPLER(named_like_comfyui(shifted)),
        "wrapped object": comfy.samplers.KSAMPLER(
            detail_daemon_sampler, {"dds_wrapped_sampler": comfy.samplers.KSAMPLER(Centred())}
        ),
    }
    for name, sampler in samplers.items():
        results.case(name, functools.partial(compare, sampler))
