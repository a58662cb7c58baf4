"""What a sampler works on, and whether a model call is for all of it. Context windows, tiles and areas are not.

A call for a part is computed by itself, exact and whole: what is kept from call to call (keys and values, forecasts) is of
the run's latent, and of another place where the call is for a part of it.
"""

from typing import Any

import torch

from parallel_backend.families.base.patching import Latents

Shapes = tuple[tuple[int, ...], ...]

PART = "another node calls the model for parts of the latent, or for several latents at a time"
"""Reason for the user."""


def shapes_of_run(model: Any, noise: torch.Tensor) -> Shapes:
    """Shapes of the latents that ComfyUI's BaseModel `model` is sampled for: the only one, or those of a nested latent, the
    picture's first."""
    nested = getattr(model, "latent_shapes", None) or ()  # older ComfyUI has none
    return tuple(map(tuple, nested)) if len(nested) > 1 else (tuple(noise.shape),)


def is_for_all(latents: Latents, options: dict[str, Any], shapes: Shapes) -> bool:
    """Whether a model call for these latents is for all of a run's latents, of `shapes`, once per conditioning.

    `options`: the call's transformer_options. Channels are not looked at: some models have more than their sampler.
    """
    if [latent.shape[2:] for latent in latents] != [shape[2:] for shape in map(torch.Size, shapes)]:
        return False
    entries, pictures = len(latents[0]), shapes[0][0]
    joined = options.get("cond_or_uncond")  # by ComfyUI; whoever calls the model by himself may leave it out
    return entries % pictures == 0 if joined is None else entries == pictures * len(joined)
