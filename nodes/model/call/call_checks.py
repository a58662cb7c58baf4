"""Checks of a model call's latents and conditioning, whoever makes the call: a sampler or another node."""

from typing import Any

import torch


def for_entries(timestep: torch.Tensor, entries: int) -> torch.Tensor:
    """The timesteps of a call's batch entries [entries, ...]. ValueError for another number of timesteps."""
    if len(timestep) == 1:
        return timestep.expand(entries, *timestep.shape[1:])
    if len(timestep) != entries:
        raise ValueError(
            f"model: another node calls it with {entries} latents at a time, and with {len(timestep)} timesteps. Remove "
            "that node, or load the model with ComfyUI's own loader."
        )
    return timestep


def check_latents(x: Any, axes: int) -> None:
    """ValueError for a latent of a call that ranks do not take. `axes`: of the first one."""
    latents = [x] if isinstance(x, torch.Tensor) else list(x)
    if latents[0].ndim != axes or any(0 in latent.shape for latent in latents):
        raise ValueError(
            f"latent_image: this model takes one latent with {axes} axes, none of them empty. Use the Empty Latent node "
            "made for this model."
        )
