"""Checks of a model call's latents and conditioning, whoever makes the call: a sampler or another node."""

from typing import Any

import torch

from parallel_backend.families import Family
from parallel_backend.families.base.patching import Latents


def for_entries(timestep: torch.Tensor, tensors: dict[str, torch.Tensor], entries: int) -> torch.Tensor:
    """The timesteps of a call's batch entries [entries, ...]. ValueError for tensors with another number of entries."""
    if len(timestep) == 1:
        timestep = timestep.expand(entries, *timestep.shape[1:])
    for name, count in {"timestep": len(timestep), **{name: len(tensor) for name, tensor in tensors.items()}}.items():
        if count != entries:
            raise ValueError(
                f"model: another node calls it with {entries} latents at a time, but with {count} of '{name}'. Remove "
                "that node, or load the model with ComfyUI's own loader."
            )
    return timestep


def check_for_own_class(x: Any, axes: int) -> None:
    """ValueError for a latent of a call for ComfyUI's own class that ranks do not take. `axes`: of the first one."""
    latents = [x] if isinstance(x, torch.Tensor) else list(x)
    if latents[0].ndim != axes or any(0 in latent.shape for latent in latents):
        raise ValueError(
            f"latent_image: this model runs as ComfyUI's own class, which takes one latent with {axes} axes, none of "
            "them empty. Use the Empty Latent node made for this model."
        )


def check_latents(family: Family, config: dict[str, Any], latents: Latents) -> None:
    """ValueError for latents that the family does not take."""
    if len(latents) > 1:
        raise ValueError(
            f"latent_image: this latent has {len(latents)} parts, but this model takes only one. Use the Empty Latent "
            "node made for this model."
        )
    (latent,), axes, channels = latents, 5 if family.patching.video else 4, family.sizes.latent_channels(config)
    if latent.ndim != axes or 0 in latent.shape:
        raise ValueError(
            f"latent_image: this latent has the shape {list(latent.shape)}, but this model takes {axes} axes, none of "
            "them empty. Use the Empty Latent node made for this model."
        )
    if latent.shape[1] != channels:
        raise ValueError(
            f"latent_image: the latent has {latent.shape[1]} channels, this model needs {channels}. "
            "Use the Empty Latent node made for this model, or a latent encoded with its own VAE."
        )
