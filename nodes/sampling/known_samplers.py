"""Tables of samplers of ComfyUI and of other packs that are pixel-wise, so that they can run on a band.

Samplers' functions are listed by their `name_of`, as in known_local.py. A new row also belongs into the test that compares
bands with the whole latent: tests/comfyui/inside/samplers.py.
"""

import inspect
from typing import Any

import comfy.samplers

from ..ui.other_nodes import definition, name_of

WRAPPING = {
    # Detail Daemon: other sigmas for the model
    "detail_daemon_node.detail_daemon_sampler": "dds_wrapped_sampler",
    "detail_daemon_node.lying_sigma_sampler": "lss_wrapped_sampler",
    # bleh: a seed for torch's own generator
    "samplers.BlehForceSeedSampler.sampler_function": "bleh_wrapped_sampler",
}
"""Functions that call another sampler with the same sigmas and pass their options on -> the option with that sampler."""

PIXEL_WISE = frozenset(
    {
        "nodes_advanced_samplers.sample_euler_pp",
        # RES4LYF: the samplers in KSampler's list that draw no noise. Others scale their noise by that of the whole latent.
        *(f"beta.sample_{name}_ode" for name in ("res_2m", "res_3m", "res_2s", "res_3s", "res_5s", "res_6s")),
        *(f"beta.sample_{name}_ode" for name in ("deis_2m", "deis_3m")),
    }
)
"""Pixel-wise functions of other modules. Those of k_diffusion and uni_pc are all pixel-wise, except for GLOBAL."""

GLOBAL = {
    "samplers.ksampler.<locals>.dpm_adaptive_function": "dpm_adaptive computes its step size from the whole latent",
    "sampling.sample_dpm_adaptive": "dpm_adaptive computes its step size from the whole latent",
    "sampling.sample_ar_video": "ar_video computes one block of frames after the other",
}
"""ComfyUI's functions that are not pixel-wise -> the reason, for the user."""


def innermost(sampler: Any) -> comfy.samplers.KSAMPLER | None:
    """The sampler inside all samplers that wrap it (WRAPPING). None: `sampler`, or the inner one, is not a KSAMPLER."""
    while type(sampler) is comfy.samplers.KSAMPLER and (option := WRAPPING.get(name_of(sampler.sampler_function))):
        sampler = options_of(sampler).get(option)
    return sampler if type(sampler) is comfy.samplers.KSAMPLER else None


def options_of(sampler: comfy.samplers.KSAMPLER) -> dict[str, Any]:
    """Arguments that the sampler's function gets by name: the sampler's options, and those of a partial function."""
    return getattr(sampler.sampler_function, "keywords", {}) | sampler.extra_options


def why_global(sampler: Any) -> str | None:
    """Return the reason for the user why a sampler cannot run on a part of the latent. None: it can."""
    inner = innermost(sampler)
    if inner is None:
        return f"{type(sampler).__name__} is not one of ComfyUI's samplers"
    function = inner.sampler_function
    name = name_of(function)
    if name in GLOBAL:
        return GLOBAL[name]
    if name not in PIXEL_WISE and not definition(function).__module__.startswith("comfy."):
        return f"{name.partition('.')[2]} is not one of ComfyUI's samplers"
    if inner is not sampler and "noise_sampler" in options_of(inner):
        return f"{name_of(sampler.sampler_function).partition('.')[2]} wraps a sampler that has its own noise"
    return None


def takes_noise_sampler(sampler: comfy.samplers.KSAMPLER) -> bool:
    """Whether the sampler draws noise between steps, so that it takes a `noise_sampler`. True for unknown samplers."""
    inner = innermost(sampler)
    if inner is None or (why_global(inner) is not None and name_of(inner.sampler_function) not in GLOBAL):
        return True
    return "noise_sampler" in inspect.signature(inner.sampler_function).parameters
