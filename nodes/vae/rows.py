"""A table of ComfyUI's VAEs that ranks can run. The key is the module of the decoder's or encoder's class."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch

if TYPE_CHECKING:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE as LTXVAE


@dataclass(frozen=True)
class Known:
    """Facts that ComfyUI's objects do not have. Functions get the VAE's model, an object of one of ComfyUI's classes."""

    drawn: Callable[[Any, torch.Tensor], torch.Tensor] = lambda _model, latent: latent
    """Return the latent plus the random noise that `decode` adds first. It is drawn once for all ranks."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that the model has otherwise on ranks, such as no noise."""
    encodes: Callable[[Any, int], bool] = lambda _model, _frames: True
    """Returns whether `encode` accepts a video with this number of pixel frames."""
    why_not: Callable[[Any], str | None] = lambda _model: None
    """Reason why a model cannot be cut all the same, in words that follow 'since'."""
    tiles: bool = False
    """Whether ranks run complete tiles, which do not depend on each other, instead of bands (tiles.py)."""
    paddings: Collection[str] = ("zeros",)
    """Padding modes that are allowed in the model's convolutions."""
    constants: tuple[tuple[str, str, Any], ...] = ()
    """(module, name, value) of constants that have other values on ranks."""


def _ltx_noise(model: "LTXVAE", latent: torch.Tensor) -> torch.Tensor:
    """Return the latent plus noise. The noise is drawn on the device on which ComfyUI draws it."""
    if not model.timestep_conditioning:
        return latent
    scale = model.decode_noise_scale
    noise = torch.randn_like(latent.to(comfy.model_management.vae_device())).to(latent)
    return noise * scale + (1.0 - scale) * latent


_LTX = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
KNOWN: Mapping[str, Known] = {
    "comfy.ldm.modules.diffusionmodules.model": Known(),
    "comfy.ldm.hunyuan_video.vae": Known(),
    "comfy.ldm.hunyuan_video.vae_refiner": Known(
        encodes=lambda model, frames: model.encoder.refiner_vae or frames == 1 or frames % 4 == 0
    ),
    _LTX: Known(
        drawn=_ltx_noise,
        values={"decode_noise_scale": 0.0},
        paddings=("zeros", "reflect", "replicate"),
        # By their memory ranks would run a video in unlike pieces, and wait for each other for ever.
        constants=((_LTX, "MAX_CHUNK_SIZE", 1 << 25), (_LTX, "MIN_CHUNK_SIZE", 1 << 25)),
    ),
    "comfy.ldm.cosmos.cosmos_tokenizer.layers3d": Known(encodes=lambda _model, frames: frames % 8 == 1),
    "comfy.ldm.wan.vae": Known(),
    "comfy.ldm.wan.vae2_2": Known(),
    "comfy.ldm.minimax.vae": Known(
        tiles=True, why_not=lambda model: None if model.tiling else "this VAE's tiling is switched off"
    ),
}
