"""Autoencoders of HunyuanImage 2.1, its refiner, and HunyuanVideo 1.5: those of latent diffusion, shrunk and enlarged by
rearrangement, with shortcuts around that. Names and settings are those of the original files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.spans import Span

from .base import Part, Piece, VAEClass, Weights, whole
from .layout import fitting, levels, own_tensors, weight
from .ldm import (
    CarriedConv3d,
    Chunks,
    Conv,
    Level,
    Middle,
    Norm,
    Resnet,
    RMSNorm,
    conv2d,
    conv3d,
    group_norm,
    is_first,
    quarter,
)
from .rearrange import channels_to_space, space_to_channels
from .streams import FrameByFrame, forget


@dataclass(frozen=True)
class Kind:
    """Layers that one of the three is made of."""

    conv: Conv
    attention_conv: Conv
    norm: Norm


KINDS = {
    "image": Kind(conv2d, conv2d, group_norm),
    "refiner": Kind(conv3d, conv3d, group_norm),
    "video": Kind(CarriedConv3d, conv3d, RMSNorm),
}


def first_is_alone(factors: Sequence[int], conv: nn.Module) -> bool:
    """Whether this chunk has a first frame that has no partner in time."""
    return factors[0] == 2 and len(factors) == 3 and isinstance(conv, CarriedConv3d) and is_first(conv)


class ShuffleDown(nn.Module):
    """[B, C, ...] -> [B, D, ...] with each size divided by its factor. A video's first frame counts twice."""

    def __init__(self, inputs: int, outputs: int, factors: tuple[int, ...], conv: Conv):
        super().__init__()
        volume = math.prod(factors)
        self.factors, self.outputs = factors, outputs
        self.conv = conv(inputs, outputs // volume)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = first_is_alone(self.factors, self.conv)
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
    """[B, C, ...] -> [B, D, ...] with each size times its factor. A video's first frame gives one."""

    def __init__(self, inputs: int, outputs: int, factors: tuple[int, ...], conv: Conv):
        super().__init__()
        volume = math.prod(factors)
        self.factors, self.repeats = factors, volume * outputs // inputs
        self.conv = conv(inputs, outputs * volume)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = first_is_alone(self.factors, self.conv)
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


def _levels(
    made: Kind, widths: Sequence[int], layers: int, factors: Sequence[Sequence[int]], name: str, resize: type[nn.Module]
) -> tuple[nn.ModuleList, int]:
    """The levels, each but the last with a `resize` of this name to the next one, and the channels behind them."""
    made_levels, width = nn.ModuleList(), widths[0]
    for index, wanted in enumerate(widths):
        blocks = [Resnet(width if number == 0 else wanted, wanted, made.conv, made.norm) for number in range(layers)]
        width, to_next = wanted, {}
        if index < len(factors):
            following = widths[min(index + 1, len(widths) - 1)]
            to_next[name] = resize(width, following, tuple(factors[index]), made.conv)
            width = following
        made_levels.append(Level(blocks, **to_next))
    return made_levels, width


class Encoder(Chunks):
    """[B, 3, (frames,) H, W] -> the latent's means [B, z, (latent frames,) h, w].

    `widths`: channels of each level. `factors`: by how much each level shrinks time (videos only), rows and columns;
    one entry less than levels, or as many. `chunked`: a video runs through in chunks of 8 frames.
    """

    def __init__(
        self,
        kind: str,
        channels: int,
        widths: Sequence[int],
        layers: int,
        factors: Sequence[Sequence[int]],
        z: int,
        chunked: bool,
    ):
        super().__init__(chunked, z, math.prod(factor[-1] for factor in factors))
        made = KINDS[kind]
        self.kind = kind
        self.time = math.prod(factor[0] for factor in factors)
        self.conv_in = made.conv(channels, widths[0])
        self.down, width = _levels(made, widths, layers, factors, "downsample", ShuffleDown)
        self.mid = Middle(width, made.conv, made.attention_conv, made.norm)
        self.norm_out, self.conv_out = made.norm(width), made.conv(width, 2 * z)

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "refiner" and x.shape[2] == 1:
            x = x.expand(-1, -1, self.time, -1, -1)
        h = self.conv_in(x)
        for level in self.down:
            h = level(h)
        return h

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        h = self.mid(h)
        shortcut = h.unflatten(1, (2 * self.z, -1)).mean(dim=2)
        return (self.conv_out(F.silu(self.norm_out(h))) + shortcut)[:, : self.z]


class Decoder(FrameByFrame):
    """[B, z, (latent frames,) h, w] -> [B, 3, (frames,) H, W]. Settings: see Encoder; in the order of the levels here."""

    def __init__(
        self,
        kind: str,
        channels: int,
        widths: Sequence[int],
        layers: int,
        factors: Sequence[Sequence[int]],
        z: int,
        chunked: bool,
    ):
        super().__init__()
        made = KINDS[kind]
        self.kind, self.chunked, self.repeats = kind, chunked, widths[0] // z
        self.conv_in = made.conv(z, widths[0])
        self.mid = Middle(widths[0], made.conv, made.attention_conv, made.norm)
        self.up, width = _levels(made, widths, layers, factors, "upsample", ShuffleUp)
        self.norm_out, self.conv_out = made.norm(width), made.conv(width, channels)

    def frames(self, z: torch.Tensor) -> Iterator[torch.Tensor]:
        h = self.mid(self.conv_in(z) + z.repeat_interleave(self.repeats, dim=1))
        forget(self)
        for chunk in h.split(2, dim=2) if self.chunked else [h]:
            for level in self.up:
                chunk = level(chunk)
            yield self.conv_out(F.silu(self.norm_out(chunk)))

    def forward(self, z: torch.Tensor, first: bool) -> torch.Tensor:
        if self.kind == "video":
            return super().forward(z, first)
        pixels = next(self.frames(z))
        return pixels[:, :, -1:] if self.kind == "refiner" and z.shape[2] == 1 else pixels


def _weights(state: Mapping[str, torch.Tensor], part: Part, settings: Mapping[str, Any]) -> Weights | None:
    """`settings`: "kind", "factors" of each part, and "chunked"."""
    tensors = own_tensors(state, part)
    blocks = levels(tensors, "down" if part == "encoder" else "up")
    if not blocks or not all(blocks):
        return None
    ends = weight(tensors, "conv_in"), weight(tensors, "conv_out")
    factors = settings["factors"][part]
    config = {
        "kind": settings["kind"],
        "channels": ends[0].shape[1] if part == "encoder" else ends[1].shape[0],
        "widths": [level[-1] for level in blocks],
        "layers": len(blocks[0]),
        "factors": factors,
        "z": ends[1].shape[0] // 2 if part == "encoder" else ends[0].shape[1],
        "chunked": settings["chunked"],
    }
    used = fitting(tensors, _build, part, config)
    channels = config["z"] if part == "encoder" else config["channels"]
    return None if used is None else Weights(config, used, math.prod(factor[-1] for factor in factors), channels)


def _build(part: Part, config: dict[str, Any]) -> nn.Module:
    return (Encoder if part == "encoder" else Decoder)(**config)


def _refiner_frames(part: Part, frames: int) -> tuple[Piece, ...]:
    """Four frames for each of the latent; a single one stands for four, and is one of four."""
    if part == "encoder":
        return Piece(Span(0, frames), 0), Piece(Span(frames, frames), max(1, frames // 4))
    return (Piece(Span(0, frames), 4 * frames if frames > 1 else 1),)


HUNYUAN_IMAGE = VAEClass("HunyuanImage 2.1", _weights, _build, whole, gathered=("k", "v"))
HUNYUAN_IMAGE_REFINER = VAEClass("HunyuanImage 2.1 refiner", _weights, _build, _refiner_frames, gathered=("k", "v"))
HUNYUAN_VIDEO_15 = VAEClass("HunyuanVideo 1.5", _weights, _build, quarter, gathered=("k", "v"))
