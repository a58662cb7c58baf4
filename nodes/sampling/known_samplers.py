"""Samplers of ComfyUI and of other packs: which of them compute a pixel from what they are given at that pixel alone.

A sampler's function is known by `name_of` it, as in known_local.py. Whoever adds a row adds it to the test that cuts and
compares: tests/comfyui/inside/foreign_samplers.py.
"""

import functools
import inspect
from typing import Any

import comfy.samplers

from ..ui.other_nodes import name_of

WRAPPING = {
    # Detail Daemon: other sigmas for the model
    "detail_daemon_node.detail_daemon_sampler": "dds_wrapped_sampler",
    "detail_daemon_node.lying_sigma_sampler": "lss_wrapped_sampler",
    # bleh: a seed for torch's own generator
    "samplers.BlehForceSeedSampler.sampler_function": "bleh_wrapped_sampler",
}
"""Functions that have another sampler do the work, at the same sigmas and with their own options handed on -> the option
that has that sampler."""

PIXEL_WISE = frozenset(
    {
        "nodes_advanced_samplers.sample_euler_pp",
        # RES4LYF: those in KSampler's list that draw no noise. Its others draw noise that is scaled by the whole latent's.
        *(f"beta.sample_{name}_ode" for name in ("res_2m", "res_3m", "res_2s", "res_3s", "res_5s", "res_6s")),
        *(f"beta.sample_{name}_ode" for name in ("deis_2m", "deis_3m")),
    }
)
"""Functions beside those of k_diffusion and uni_pc, which all are but for those in GLOBAL."""

GLOBAL = {
    "samplers.ksampler.<locals>.dpm_adaptive_function": "dpm_adaptive sets its step size by the whole latent",
    "sampling.sample_dpm_adaptive": "dpm_adaptive sets its step size by the whole latent",
}
"""ComfyUI's functions that are not -> why."""


def innermost(sampler: Any) -> comfy.samplers.KSAMPLER | None:
    """The sampler that does the work, inside those that wrap it. None: `sampler`, or what it wraps, is no KSAMPLER."""
    while type(sampler) is comfy.samplers.KSAMPLER and (option := WRAPPING.get(name_of(sampler.sampler_function))):
        sampler = options_of(sampler).get(option)
    return sampler if type(sampler) is comfy.samplers.KSAMPLER else None


def options_of(sampler: comfy.samplers.KSAMPLER) -> dict[str, Any]:
    """What its function is called with: the sampler's own options, and those of a partial function."""
    return getattr(sampler.sampler_function, "keywords", {}) | sampler.extra_options


def why_global(sampler: Any) -> str | None:
    """Reason for the user why a sampler cannot run on a part of the latent. None: it can."""
    inner = innermost(sampler)
    if inner is None:
        return f"{type(sampler).__name__} is not one of ComfyUI's samplers"
    function = inner.sampler_function
    name = name_of(function)
    if name in GLOBAL:
        return GLOBAL[name]
    if name not in PIXEL_WISE and not _module(function).startswith("comfy."):
        return f"{name.partition('.')[2]} is not one of ComfyUI's samplers"
    if inner is not sampler and "noise_sampler" in options_of(inner):
        return f"{name_of(sampler.sampler_function).partition('.')[2]} wraps a sampler with noise of its own"
    return None


def takes_noise_sampler(sampler: comfy.samplers.KSAMPLER) -> bool:
    """Whether it draws noise between steps, from what it is given or from its own. True for one that nobody knows."""
    inner = innermost(sampler)
    if inner is None or (why_global(inner) is not None and name_of(inner.sampler_function) not in GLOBAL):
        return True
    return "noise_sampler" in inspect.signature(inner.sampler_function).parameters


def _module(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return function.__module__ if hasattr(function, "__qualname__") else type(function).__module__
