"""Autoencoders of HunyuanImage 2.1, its refiner, and HunyuanVideo 1.5, under the names and settings of the original files.

They are built from latent diffusion's blocks. Levels are shrunk and enlarged by a rearrangement between positions and
channels, with a shortcut around it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.spans import Span

from .base import Part, PartModule, Piece, VAEClass, Weights, whole
from .layout import weights_by_levels
from .ldm import (
    IMAGE,
    CarriedConv3d,
    ChunkedDecoder,
    ChunkedEncoder,
    Conv,
    Kind,
    Level,
    RMSNorm,
    conv3d,
    group_norm,
    is_first,
    quarter,
)
from .rearrange import channels_to_space, space_to_channels

KINDS = {
    "image": IMAGE,
    "refiner": Kind(conv3d, conv3d, group_norm),
    "video": Kind(CarriedConv3d, conv3d, RMSNorm),
}


@dataclass(frozen=True)
class Config:
    """Settings of a part. Levels are in the order in which they run."""

    kind: str
    """A key of KINDS."""
    channels: int
    """Channels of the pixels."""
    z: int
    """Channels of the latent."""
    widths: Sequence[int]
    """Channels of each level."""
    layers: int
    """Blocks of each level."""
    factors: Sequence[tuple[int, ...]]
    """Factors of each level for (time of videos,) rows and columns. One entry less than levels, or as many."""
    chunked: bool
    """A video runs through in chunks: see ChunkedEncoder and ChunkedDecoder."""

    def levels(self, name: str, resize: "type[ShuffleDown | ShuffleUp]") -> tuple[list[Level], int]:
        """The levels, which end in a module `name` of class `resize` to the next one, and the channels of their output."""
        kind, levels, before = KINDS[self.kind], [], self.widths[0]
        for index, width in enumerate(self.widths):
            following, to_next = width, {}
            if index < len(self.factors):
                following = self.widths[min(index + 1, len(self.widths) - 1)]
                to_next[name] = resize(width, following, self.factors[index], kind.conv)
            levels.append(Level(before, width, self.layers, kind, **to_next))
            before = following
        return levels, before


def first_is_alone(factors: Sequence[int], conv: nn.Module) -> bool:
    """Whether this chunk begins with the video's first frame, where `factors` pair all other frames in time."""
    return factors[0] == 2 and len(factors) == 3 and isinstance(conv, CarriedConv3d) and is_first(conv)


class ShuffleDown(nn.Module):
    """[B, C, ...] -> [B, D, ...] with each size divided by its factor. A video's first frame is paired with itself."""

    def __init__(self, inputs: int, outputs: int, factors: tuple[int, ...], conv: Conv):
        super().__init__()
        volume = math.prod(factors)
        self.factors, self.outputs = factors, outputs
        self.conv = conv(inputs, outputs // volume)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = first_is_alone(self.factors, self.conv)  # before the convolution, which carries frames from then on
        h = self.conv(x)
        if not first:
            return self._shrink(h, x, self.factors)
        alone = (1, *self.factors[1:])
        once = space_to_channels(h[:, :, :1], alone, channels_first=False).repeat(1, 2, 1, 1, 1)
        once = once + self._shortcut(x[:, :, :1], alone)
        rest = self._shrink(h[:, :, 1:], x[:, :, 1:], self.factors) if x.shape[2] > 1 else once[:, :, :0]
        return torch.cat((once, rest), dim=2)

    def _shrink(self, h: torch.Tensor, x: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
        return space_to_channels(h, factors, channels_first=False) + self._shortcut(x, factors)

    def _shortcut(self, x: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
        return space_to_channels(x, factors, channels_first=False).unflatten(1, (self.outputs, -1)).mean(dim=2)


class ShuffleUp(nn.Module):
    """[B, C, ...] -> [B, D, ...] with each size times its factor. A video's first frame stays one frame."""

    def __init__(self, inputs: int, outputs: int, factors: tuple[int, ...], conv: Conv):
        super().__init__()
        volume = math.prod(factors)
        self.factors, self.repeats = factors, volume * outputs // inputs
        self.conv = conv(inputs, outputs * volume)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = first_is_alone(self.factors, self.conv)  # before the convolution, which carries frames from then on
        h = self.conv(x)
        if not first:
            return self._enlarge(h, x)
        alone = (1, *self.factors[1:])
        once = channels_to_space(h[:, :, :1], alone, channels_first=False).chunk(2, dim=1)[0]
        once = once + channels_to_space(x[:, :, :1].repeat_interleave(self.repeats // 2, dim=1), alone, channels_first=False)
        return torch.cat((once, self._enlarge(h[:, :, 1:], x[:, :, 1:])), dim=2) if x.shape[2] > 1 else once

    def _enlarge(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shortcut = channels_to_space(x.repeat_interleave(self.repeats, dim=1), self.factors, channels_first=False)
        return channels_to_space(h, self.factors, channels_first=False) + shortcut


class Encoder(ChunkedEncoder):
    """[B, 3, (frames,) H, W] -> the latent's means [B, z, (latent frames,) h, w]."""

    def __init__(self, config: Config):
        levels, last = config.levels("downsample", ShuffleDown)
        channels, scale = (config.channels, config.widths[0], last, config.z), math.prod(step[-1] for step in config.factors)
        super().__init__(KINDS[config.kind], channels, levels, config.chunked, scale)
        self.refines, self.time = config.kind == "refiner", math.prod(factor[0] for factor in config.factors)

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        if self.refines and x.shape[2] == 1:
            x = x.expand(-1, -1, self.time, -1, -1)
        return super().shrink(x)

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        h = self.mid(h)
        shortcut = h.unflatten(1, (2 * self.z, -1)).mean(dim=2)
        return (self.conv_out(F.silu(self.norm_out(h))) + shortcut)[:, : self.z]


class Decoder(ChunkedDecoder):
    """[B, z, (latent frames,) h, w] -> [B, 3, (frames,) H, W]."""

    def __init__(self, config: Config):
        levels, last = config.levels("upsample", ShuffleUp)
        channels = config.z, config.widths[0], last, config.channels
        super().__init__(KINDS[config.kind], channels, levels, config.chunked)
        self.kind, self.repeats = config.kind, config.widths[0] // config.z

    def middle(self, z: torch.Tensor) -> torch.Tensor:
        return self.mid(self.conv_in(z) + z.repeat_interleave(self.repeats, dim=1))

    def forward(self, z: torch.Tensor, first: bool) -> torch.Tensor:
        if self.kind == "video":
            return super().forward(z, first)
        pixels = next(self.frames(z))
        return pixels[:, :, -1:] if self.kind == "refiner" and z.shape[2] == 1 else pixels


def _build(part: Part, config: dict[str, Any]) -> PartModule:
    settings = Config(**config | {"factors": [tuple(factor) for factor in config["factors"]]})
    return Encoder(settings) if part == "encoder" else Decoder(settings)


def _weights(state: Mapping[str, torch.Tensor], part: Part, settings: Mapping[str, Any]) -> Weights | None:
    """`settings`: "kind", "factors" of each part, and "chunked"."""
    factors = settings["factors"][part]
    config = {"kind": settings["kind"], "factors": factors, "chunked": settings["chunked"]}
    return weights_by_levels(state, part, _build, config, math.prod(factor[-1] for factor in factors))


def _refiner_frames(part: Part, frames: int) -> tuple[Piece, ...]:
    """Four frames of pixels for each frame of the latent. A single frame is encoded as four copies, and decoded as one."""
    if part == "encoder":
        return Piece(Span(0, frames), 0), Piece(Span(frames, frames), max(1, frames // 4))
    return (Piece(Span(0, frames), 4 * frames if frames > 1 else 1),)


HUNYUAN_IMAGE = VAEClass("HunyuanImage 2.1", _weights, _build, whole, gathered=("k", "v"))
HUNYUAN_IMAGE_REFINER = VAEClass("HunyuanImage 2.1 refiner", _weights, _build, _refiner_frames, gathered=("k", "v"))
HUNYUAN_VIDEO_15 = VAEClass("HunyuanVideo 1.5", _weights, _build, quarter, gathered=("k", "v"))
