"""Cuts a sampler's tensor into bands. ComfyUI's samplers get nested latents as one tensor [B, 1, N]: the values of all
latents, one latent after the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.patching import Latents, Patching

Shapes = tuple[tuple[int, ...], ...]


def packed(latents: Latents) -> torch.Tensor:
    """Return the sampler's tensor for a call's latents: the latent itself if there is only one, otherwise [B, 1, N]."""
    if len(latents) == 1:
        return latents[0]
    return torch.cat([latent.reshape(len(latent), 1, -1) for latent in latents], dim=-1)


def unpacked(value: torch.Tensor, shapes: Shapes) -> Latents:
    """Return the latents in a sampler's tensor. `shapes`: of the latents; their batch sizes are ignored."""
    if len(shapes) == 1:
        return (value,)
    parts = value[:, 0].split([math.prod(shape[1:]) for shape in shapes], dim=-1)
    return tuple(part.reshape(len(value), *shape[1:]) for part, shape in zip(parts, shapes, strict=True))


@dataclass(frozen=True)
class BandCut:
    """`rows`: the latent rows (or frames) of each band. `shapes`: of the whole latents, the image's first."""

    patching: Patching
    rows: tuple[Span, ...]
    shapes: Shapes

    def band(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a band's part of a sampler's tensor of latents, masks or noise."""
        return packed(self.patching.band(unpacked(whole, self.shapes), self.rows[index]))

    def whole(self, bands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor, from the parts of all bands in order."""
        parts = [unpacked(band, self.shapes_of(index)) for index, band in enumerate(bands)]
        return packed(self.patching.join(parts))

    def shapes_of(self, index: int) -> Shapes:
        """Return the shapes of a band's latents."""
        whole = tuple(torch.empty(shape, device="meta") for shape in self.shapes)
        return tuple(tuple(latent.shape) for latent in self.patching.band(whole, self.rows[index]))
