"""Shapes of the latents that a sampler works on, and whether a model call is for all of them.

Calls for context windows, tiles and areas are for a part. Such a call is computed exactly and separately: stored keys,
values and forecasts belong to other positions than the part's.
"""

from typing import Any

import torch

from parallel_backend.own_class.calls.patching import Latents

Shapes = tuple[tuple[int, ...], ...]

PART = "another node calls the model for parts of the latent, or for several latents at a time"
"""Reason for the user."""


def shapes_of_run(model: Any, noise: torch.Tensor) -> Shapes:
    """Shapes of the latents for which ComfyUI's BaseModel `model` is sampled. Of nested latents, the video's comes first."""
    nested = model.latent_shapes or ()
    return tuple(map(tuple, nested)) if len(nested) > 1 else (tuple(noise.shape),)


def is_for_all(latents: Latents, options: dict[str, Any], shapes: Shapes) -> bool:
    """Whether a model call with these latents is for all of a run's latents, of `shapes`, once per conditioning. `options`:
    the call's transformer_options. Channels are not compared: some models get more of them than the sampler."""
    if [latent.shape[2:] for latent in latents] != [shape[2:] for shape in map(torch.Size, shapes)]:
        return False
    entries, pictures = len(latents[0]), shapes[0][0]
    joined = options.get("cond_or_uncond")  # set by ComfyUI; nodes that call the model themselves may leave it out
    return entries % pictures == 0 if joined is None else entries == pictures * len(joined)
