"""LTX-Video's and LTX-2's video autoencoder (arXiv 2501.00103), under the names and settings of Lightricks' files.

Settings are those of a file's config, as ComfyUI's class keeps them. Frames run through in pieces, block by block, which
bounds memory. Missing are noise that is added inside the decoder (`inject_noise`), and norms over groups.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.spans import Span

from .base import Part, PartModule, Piece, VAEClass, Weights
from .layout import fitting, with_quant_conv
from .rearrange import channels_to_space, space_to_channels
from .streams import FrameByFrame, Late, StreamedConv3d, Streaming, forget, in_turn, pieces, through

FRAMES_PER_LATENT = 8
UP_SHUFFLES = {"compress_time": (2, 1, 1), "compress_space": (1, 2, 2), "compress_all": (2, 2, 2)}
DOWN_SHUFFLES = {f"{name}_res": factors for name, factors in UP_SHUFFLES.items()}
DOWN_STRIDES = UP_SHUFFLES | {"compress_all_x_y": (2, 2, 2)}


def blocks_of(config: Mapping[str, Any], part: Part) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings of a part's blocks, in the encoder's order."""
    return [(name, value if isinstance(value, dict) else {"num_layers": value}) for name, value in config["blocks"][part]]


def why_not(config: Mapping[str, Any]) -> str | None:
    """The setting that this module does not support, in words that follow 'since'. None: all are supported."""
    known = {"encoder": {"res_x", "res_x_y", *DOWN_STRIDES, *DOWN_SHUFFLES}, "decoder": {"res_x", "res_x_y", *UP_SHUFFLES}}
    for part in ("encoder", "decoder"):
        for name, options in blocks_of(config, part):
            if name not in known[part]:
                return f"this VAE has blocks of the kind {name}"
            if options.get("inject_noise"):
                return "this VAE's decoder draws noise inside its layers"
    if config["norm_layer"] != "pixel_norm" or config["latent_log_var"] not in ("per_channel", "uniform", "constant"):
        return "this VAE's layers are of another kind"
    return None


def unfolded(x: torch.Tensor, patch: int) -> torch.Tensor:
    """[B, C, T, H, W] -> [B, C patch patch, T, H / patch, W / patch]. Within a patch columns come before rows."""
    return space_to_channels(x.transpose(3, 4), (1, patch, patch), channels_first=True).transpose(3, 4)


def folded(x: torch.Tensor, patch: int) -> torch.Tensor:
    """The inverse of `unfolded`."""
    return channels_to_space(x.transpose(3, 4), (1, patch, patch), channels_first=True).transpose(3, 4)


def pixel_norm(x: torch.Tensor) -> torch.Tensor:
    """Scale each pixel's channels to a mean square of 1."""
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of [B, C, T, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class TimeEmbedding(nn.Module):
    """The decoder's timestep -> [1, channels]."""

    def __init__(self, channels: int):
        super().__init__()
        from diffusers.models.embeddings import TimestepEmbedding, Timesteps

        self.time_proj = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(256, channels)

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.timestep_embedder(self.time_proj(timestep.flatten()).to(dtype))


class Resnet(nn.Module):
    """Two convolutions and a shortcut. With `timed`, the decoder's timestep shifts and scales their inputs."""

    def __init__(self, inputs: int, outputs: int, timed: bool = False, **conv: Any):
        super().__init__()
        self.conv1, self.conv2 = StreamedConv3d(inputs, outputs, **conv), StreamedConv3d(outputs, outputs, **conv)
        self.late = Late()
        changes = inputs != outputs
        self.norm3: nn.Module = ChannelNorm(inputs) if changes else nn.Identity()
        self.conv_shortcut: nn.Module = nn.Conv3d(inputs, outputs, 1) if changes else nn.Identity()
        if timed:
            self.scale_shift_table = nn.Parameter(torch.empty(4, inputs))

    def forward(self, x: torch.Tensor, last: bool, time: torch.Tensor | None = None) -> torch.Tensor:
        h = pixel_norm(x)
        if time is not None:
            table = self.scale_shift_table.to(h) + time.view(4, -1)
            shift1, scale1, shift2, scale2 = table.view(4, 1, -1, 1, 1, 1).unbind()
            h = h * (1 + scale1) + shift1
        h = pixel_norm(self.conv1(F.silu(h), last))
        if time is not None:
            h = h * (1 + scale2) + shift2
        h = self.conv2(F.silu(h), last)
        return h + self.late(self.conv_shortcut(self.norm3(x)), h.shape[2])


class Resnets(nn.Module):
    """Resnet blocks with the same channels, and one embedding of the timestep for all."""

    def __init__(self, channels: int, layers: int, timed: bool = False, **conv: Any):
        super().__init__()
        self.timed = timed
        if timed:
            self.time_embedder = TimeEmbedding(4 * channels)
        self.res_blocks = nn.ModuleList(Resnet(channels, channels, timed, **conv) for _ in range(layers))

    def forward(self, x: torch.Tensor, last: bool, timestep: torch.Tensor | None = None) -> torch.Tensor:
        time = self.time_embedder(timestep, x.dtype) if self.timed else None
        for block in self.res_blocks:
            x = block(x, last, time)
        return x


class ShuffleDown(Streaming):
    """A convolution whose positions become channels, plus a mean over the input's positions."""

    def __init__(self, inputs: int, outputs: int, stride: tuple[int, int, int], **conv: Any):
        super().__init__()
        self.stride, self.outputs = stride, outputs
        self.conv = StreamedConv3d(inputs, outputs // math.prod(stride), **conv)
        self.odd: torch.Tensor | None = None  # the last frame without a partner, [B, C, 0 or 1, H, W]

    def forget(self) -> None:
        self.odd = None

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        """The first frame counts twice. A frame without a partner waits for the next piece."""
        if self.stride[0] == 2:
            x = torch.cat((x[:, :, :1] if self.odd is None else self.odd, x), dim=2)
            whole = x.shape[2] // 2 * 2
            x, self.odd = x[:, :, :whole], x[:, :, whole:]
        shortcut = space_to_channels(x, self.stride, channels_first=True).unflatten(1, (self.outputs, -1)).mean(dim=2)
        return space_to_channels(self.conv(x, last), self.stride, channels_first=True) + shortcut


class ShuffleUp(Streaming):
    """A convolution whose channels become positions. `residual`: plus the input, rearranged in the same way."""

    def __init__(self, inputs: int, stride: tuple[int, int, int], shrink: int, residual: bool, **conv: Any):
        super().__init__()
        volume = math.prod(stride)
        self.stride, self.repeats, self.residual = stride, volume // shrink, residual
        self.conv = StreamedConv3d(inputs, volume * inputs // shrink, **conv)
        self.late = Late()
        self.begun = False

    def forget(self) -> None:
        self.begun = False

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        """Doubles all frames but the video's first, if the stride in time is 2."""
        y = self.conv(x, last)
        x = self.late(x, y.shape[2]) if self.residual else x
        y = channels_to_space(y, self.stride, channels_first=True)
        if self.residual:
            y = y + channels_to_space(x, self.stride, channels_first=True).repeat(1, self.repeats, 1, 1, 1)
        if self.stride[0] == 2 and y.shape[2] and not self.begun:
            y, self.begun = y[:, :, 1:], True
        return y


class Encoder(PartModule):
    """[B, 3, 8 n + 1, H, W] -> the latent's means [B, latent channels, n + 1, H / 32, W / 32], before normalisation."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        conv = {"padding_mode": config["padding_modes"]["encoder"]}
        self.patch, self.latent_channels = config["patch_size"], config["latent_channels"]
        channels = config["width"]
        self.conv_in = StreamedConv3d(config["channels"] * self.patch**2, channels, **conv)
        self.down_blocks = nn.ModuleList()
        for name, options in blocks_of(config, "encoder"):
            before = channels
            if name in ("res_x_y", "compress_all_x_y", *DOWN_SHUFFLES):
                channels *= options.get("multiplier", 2)
            if name == "res_x":
                block: nn.Module = Resnets(channels, options["num_layers"], **conv)
            elif name == "res_x_y":
                block = Resnet(before, channels, **conv)
            elif name in DOWN_SHUFFLES:
                block = ShuffleDown(before, channels, DOWN_SHUFFLES[name], **conv)
            else:
                block = StreamedConv3d(before, channels, DOWN_STRIDES[name], **conv)
            self.down_blocks.append(block)
        variances = self.latent_channels if config["latent_log_var"] == "per_channel" else 1
        self.conv_out = StreamedConv3d(channels, self.latent_channels + variances, **conv)

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        """The first frame of a video, or the next eight -> one frame of the latent."""
        h = unfolded(x, self.patch)
        for layer in (self.conv_in, *self.down_blocks):
            h = layer(h, False)
        return self.conv_out(F.silu(pixel_norm(h)), False)[:, : self.latent_channels]

    def reset(self) -> None:
        forget(self)


class Decoder(FrameByFrame):
    """Latents [B, latent channels, n + 1, h, w] without normalisation -> [B, 3, 8 n + 1, 32 h, 32 w]."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        conv = {"padding_mode": config["padding_modes"]["decoder"], "causal": config["causal_decoder"]}
        self.patch, self.timed, self.timestep = config["patch_size"], config["timed"], config["timestep"]
        channels = config["width"]
        self.conv_in = StreamedConv3d(config["latent_channels"], channels, **conv)
        self.up_blocks = nn.ModuleList()
        for name, options in reversed(blocks_of(config, "decoder")):
            before = channels
            if name == "res_x":
                block: nn.Module = Resnets(channels, options["num_layers"], self.timed, **conv)
            elif name == "res_x_y":
                channels = options.get("out_channels", channels // options.get("multiplier", 2))
                block = Resnet(before, channels, **conv)
            else:
                shrink = options.get("multiplier", 1)
                channels //= shrink
                residual = name == "compress_all" and options.get("residual", False)
                block = ShuffleUp(before, UP_SHUFFLES[name], shrink, residual, **conv)
            self.up_blocks.append(block)
        self.conv_out = StreamedConv3d(channels, config["channels"] * self.patch**2, **conv)
        if self.timed:
            self.timestep_scale_multiplier = nn.Parameter(torch.empty(()))
            self.last_time_embedder = TimeEmbedding(2 * channels)
            self.last_scale_shift_table = nn.Parameter(torch.empty(2, channels))

    def frames(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        timestep, shift, scale = None, 0.0, 0.0
        if self.timed:
            timestep = self.timestep * self.timestep_scale_multiplier.to(x)
            table = self.last_scale_shift_table.to(x) + self.last_time_embedder(timestep, x.dtype).view(2, -1)
            shift, scale = table.view(2, 1, -1, 1, 1, 1).unbind()
        stream = through(self.conv_in, pieces(x))
        for block in self.up_blocks:
            timed = isinstance(block, Resnets) and block.timed
            stream = through(functools.partial(block, timestep=timestep) if timed else block, stream)
        for part, last in stream:
            yield folded(self.conv_out(F.silu(pixel_norm(part) * (1 + scale) + shift), last), self.patch)


def _weights(state: Mapping[str, torch.Tensor], part: Part, settings: Mapping[str, Any]) -> Weights | None:
    """`settings`: the keys of `config` that Encoder and Decoder read, for both parts, without "width" and "channels"."""
    if why_not(settings) is not None:
        return None
    tensors = with_quant_conv(state, part)
    ends = tensors["conv_in.conv.weight"], tensors["conv_out.conv.weight"]
    pixels = ends[0].shape[1] if part == "encoder" else ends[1].shape[0]
    config = dict(settings) | {"width": ends[0].shape[0], "channels": pixels // settings["patch_size"] ** 2}
    used = fitting(tensors, _build, part, config)
    strides = DOWN_STRIDES | DOWN_SHUFFLES if part == "encoder" else UP_SHUFFLES
    steps = [strides[name] for name, _options in blocks_of(settings, part) if name in strides]
    if used is None or math.prod(step[0] for step in steps) != FRAMES_PER_LATENT:
        return None
    scale = settings["patch_size"] * math.prod(step[1] for step in steps)
    return Weights(config, used, scale, settings["latent_channels"] if part == "encoder" else config["channels"])


def _build(part: Part, config: dict[str, Any]) -> PartModule:
    return (Encoder if part == "encoder" else Decoder)(config)


def _pieces(part: Part, frames: int) -> tuple[Piece, ...]:
    """An encoder leaves out the last frames if they make no full frame of the latent, as ComfyUI does."""
    per = FRAMES_PER_LATENT
    if part == "decoder":
        return in_turn(frames, per * (frames - 1) + 1)
    starts = range(1, frames - per + 1, per)
    return (Piece(Span(0, 1), 1), *(Piece(Span(start, start + per), 1) for start in starts))


LTX = VAEClass("LTX-Video", _weights, _build, _pieces)
