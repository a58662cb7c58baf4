"""Autoencoders in the layout of latent diffusion (arXiv 2112.10752), under its names: AutoencoderKL, the VAE of images (SD,
SDXL, SD3, Flux, Flux.2 and others), HunyuanVideo's (arXiv 2412.03603), and blocks that HunyuanImage's and HunyuanVideo 1.5's
share with them.

A video runs through in chunks of frames where ComfyUI runs it so. A GroupNorm takes its statistics over a chunk, so a video
in chunks has another result than the whole video.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.spans import Span

from .base import Edges, Part, PartModule, Piece, VAEClass, Weights, set_edges, whole
from .layout import QUANT, part_tensors, weights_by_levels
from .streams import FrameByFrame, Streaming, forget, in_turn, joined

Conv = Callable[..., nn.Module]
"""(inputs, outputs, kernel=3, stride=1) -> a convolution of the kind that an autoencoder is made of."""
Norm = Callable[[int], nn.Module]
"""channels -> a norm over them."""


def conv2d(inputs: int, outputs: int, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def conv3d(inputs: int, outputs: int, kernel: int = 3) -> nn.Conv3d:
    """A convolution that is not causal: it sees frames before and behind, and zeros beyond the video."""
    return nn.Conv3d(inputs, outputs, kernel, padding=kernel // 2)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


@dataclass(frozen=True)
class Kind:
    """The layers that an autoencoder is made of."""

    conv: Conv
    attention_conv: Conv
    norm: Norm


class CarriedConv3d(Streaming):
    """A causal convolution over chunks of frames. Before the video and beyond its edges it sees the outermost ones again."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int | tuple[int, int, int] = 1):
        super().__init__()
        padding = (0, kernel // 2, kernel // 2)
        self.conv = nn.Conv3d(inputs, outputs, kernel, stride, padding, padding_mode="replicate" if kernel > 1 else "zeros")
        self.carried: torch.Tensor | None = None

    def forget(self) -> None:
        self.carried = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.conv.kernel_size[0] > 1:
            before = x[:, :, :1].expand(-1, -1, 2, -1, -1) if self.carried is None else self.carried
            x = torch.cat((before, x), dim=2)
            # Two frames for every stride, as in ComfyUI. With a stride of 2 in time the next window of the whole video may
            # begin one frame later, so that a video in chunks has another result.
            self.carried = x[:, :, -2:].clone()
        return self.conv(x)


def is_first(conv: nn.Module) -> bool:
    """Whether the next chunk is the video's first."""
    return not isinstance(conv, CarriedConv3d) or conv.carried is None


IMAGE, VIDEO = Kind(conv2d, conv2d, group_norm), Kind(CarriedConv3d, conv3d, group_norm)


class RMSNorm(nn.Module):
    """Over the channels of [B, C, T, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=1) * len(self.gamma) ** 0.5 * self.gamma


class Resnet(nn.Module):
    def __init__(self, inputs: int, outputs: int, kind: Kind):
        super().__init__()
        self.norm1, self.conv1 = kind.norm(inputs), kind.conv(inputs, outputs)
        self.norm2, self.conv2 = kind.norm(outputs), kind.conv(outputs, outputs)
        self.nin_shortcut = kind.conv(inputs, outputs, kernel=1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class Attention(nn.Module):
    """One head over all pixels of all frames."""

    def __init__(self, channels: int, kind: Kind):
        super().__init__()
        self.norm = kind.norm(channels)
        self.q, self.k, self.v, self.proj_out = (kind.attention_conv(channels, channels, kernel=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, ...] -> the same shape. On bands, k and v return the pixels of all ranks (VAEClass.gathered)."""
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).transpose(1, 2)[:, None].contiguous() for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(h)


class Middle(nn.Module):
    def __init__(self, channels: int, kind: Kind):
        super().__init__()
        self.block_1, self.block_2 = (Resnet(channels, channels, kind) for _ in range(2))
        self.attn_1 = Attention(channels, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """`layers` blocks of one resolution, then the `resize` modules, `downsample` or `upsample`, to the next level."""

    def __init__(self, inputs: int, outputs: int, layers: int, kind: Kind, **resize: nn.Module):
        super().__init__()
        self.block = nn.ModuleList(Resnet(inputs if i == 0 else outputs, outputs, kind) for i in range(layers))
        self.names = tuple(resize)
        for name, module in resize.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.block:
            x = block(x)
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class Down(nn.Module):
    """Half the rows and columns, and 1 / `time` of the frames, by a convolution with strides. `time` 0: an image."""

    def __init__(self, channels: int, time: int):
        super().__init__()
        if time:
            self.conv: nn.Module = CarriedConv3d(channels, channels, stride=(time, 2, 2))
        else:
            self.conv = nn.Conv2d(channels, channels, 3, stride=2)
            set_edges(self.conv, Edges(0, 1, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Up(nn.Module):
    """Repeats rows and columns twice, and all frames but the video's first `time` times. `time` 0: an image."""

    def __init__(self, channels: int, time: int):
        super().__init__()
        self.time = time
        self.conv = CarriedConv3d(channels, channels) if time else conv2d(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.time:
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        if self.time > 1:
            once = int(is_first(self.conv))
            x = torch.cat((x[:, :, :once], x[:, :, once:].repeat_interleave(self.time, dim=2)), dim=2)
        return self.conv(x.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1))


class ChunkedEncoder(PartModule):
    """An encoder that gets a video's first frame, then 8 frames at a time, and at last none: then it returns the latent.

    Its levels see a chunk at a time (`chunked`), or the whole video at the end. The middle sees all frames.
    """

    def __init__(self, kind: Kind, channels: Sequence[int], levels: Iterable[nn.Module], chunked: bool, scale: int):
        """`channels`: of the pixels, behind the first convolution, behind the levels, and of the latent."""
        super().__init__()
        pixels, first, last, self.z = channels
        self.chunked, self.scale = chunked, scale
        self.conv_in, self.down = kind.conv(pixels, first), nn.ModuleList(levels)
        self.mid, self.norm_out, self.conv_out = Middle(last, kind), kind.norm(last), kind.conv(last, 2 * self.z)
        self._kept: list[torch.Tensor] = []

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """Pixels -> input of the middle."""
        h = self.conv_in(x)
        for level in self.down:
            h = level(h)
        return h

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        """Input of the middle -> the latent's means."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        """[B, 3, frames, H, W] -> [B, z, 0, ...]; at the last call the whole latent. An image [B, 3, H, W] -> its latent."""
        if x.ndim == 4:
            return self.finish(self.shrink(x))
        if x.shape[2]:
            self._kept.append(self.shrink(x) if self.chunked else x)
            return x.new_empty(x.shape[0], self.z, 0, x.shape[3] // self.scale, x.shape[4] // self.scale)
        h = joined(self._kept)
        h = h if self.chunked else self.shrink(h)
        # The middle's causal convolutions begin anew, since the middle sees the video from its first frame on.
        self.reset()
        latent = self.finish(h)
        self.reset()
        return latent

    def reset(self) -> None:
        self._kept = []
        forget(self)


class ChunkedDecoder(FrameByFrame):
    """A decoder whose middle sees all frames of the latent, and whose levels see two at a time if it is `chunked`."""

    def __init__(self, kind: Kind, channels: Sequence[int], levels: Iterable[nn.Module], chunked: bool):
        """`channels`: of the latent, behind the first convolution, behind the levels, and of the pixels."""
        super().__init__()
        z, first, last, pixels = channels
        self.chunked = chunked
        self.conv_in, self.mid, self.up = kind.conv(z, first), Middle(first, kind), nn.ModuleList(levels)
        self.norm_out, self.conv_out = kind.norm(last), kind.conv(last, pixels)

    def middle(self, z: torch.Tensor) -> torch.Tensor:
        """The latent -> input of the first level."""
        raise NotImplementedError

    def levels(self) -> Iterator[nn.Module]:
        """In the order in which they run."""
        return iter(self.up)

    def frames(self, z: torch.Tensor) -> Iterator[torch.Tensor]:
        h = self.middle(z)
        forget(self)  # the middle has no frames to carry on, and the levels begin with the first frame
        for chunk in h.split(2, dim=2) if self.chunked else [h]:
            for level in self.levels():
                chunk = level(chunk)
            yield self.conv_out(F.silu(self.norm_out(chunk)))


class Encoder(ChunkedEncoder):
    """[B, 3, (4 n + 1,) H, W] -> the latent's means [B, z, (n + 1,) h, w].

    `widths`: channels of each level. `times`: the factor by which each level but the last shrinks the frames; 0 for images.
    `chunked`: see ChunkedEncoder. `quant`: whether a 1x1 convolution follows.
    """

    def __init__(
        self, channels: int, widths: Sequence[int], layers: int, times: Sequence[int], z: int, chunked: bool, quant: bool
    ):
        kind, levels, before = VIDEO if math.prod(times) else IMAGE, [], widths[0]
        for index, width in enumerate(widths):
            resize = {"downsample": Down(width, times[index])} if index < len(widths) - 1 else {}
            levels.append(Level(before, width, layers, kind, **resize))
            before = width
        super().__init__(kind, (channels, widths[0], before, z), levels, chunked, 2 ** (len(widths) - 1))
        self.quant_conv = kind.attention_conv(2 * z, 2 * z, kernel=1) if quant else nn.Identity()

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        h = self.conv_out(F.silu(self.norm_out(self.mid(h))))
        return self.quant_conv(h)[:, : self.z]


class Decoder(ChunkedDecoder):
    """[B, z, (n + 1,) h, w] -> [B, 3, (4 n + 1,) H, W]. Settings: see Encoder; levels are in the order of the file.

    `times`: the factor by which each level but the first enlarges the frames; 0 for images.
    """

    def __init__(
        self, channels: int, widths: Sequence[int], layers: int, times: Sequence[int], z: int, chunked: bool, quant: bool
    ):
        kind, levels, before = VIDEO if math.prod(times) else IMAGE, [], widths[-1]
        for index, width in reversed(list(enumerate(widths))):
            resize = {"upsample": Up(width, times[index - 1])} if index else {}
            levels.append(Level(before, width, layers, kind, **resize))
            before = width
        super().__init__(kind, (z, widths[-1], before, channels), reversed(levels), chunked)
        self.post_quant_conv = kind.attention_conv(z, z, kernel=1) if quant else nn.Identity()

    def middle(self, z: torch.Tensor) -> torch.Tensor:
        return self.mid(self.conv_in(self.post_quant_conv(z)))

    def levels(self) -> Iterator[nn.Module]:
        return reversed(self.up)

    def forward(self, z: torch.Tensor, first: bool) -> torch.Tensor:
        return next(self.frames(z)) if z.ndim == 4 else super().forward(z, first)


def _build(part: Part, config: dict[str, Any]) -> PartModule:
    return (Encoder if part == "encoder" else Decoder)(**config)


def _weights(state: Mapping[str, torch.Tensor], part: Part, settings: Mapping[str, Any]) -> Weights | None:
    """`settings`: "times" of each part, and "chunked"."""
    if not {f"{part}.norm_out.weight", f"{part}.mid.block_1.norm1.weight"} <= state.keys():
        return None
    times, quant = settings["times"][part], f"{QUANT[part]}.weight" in state
    config = {"times": times, "chunked": settings["chunked"], "quant": quant}
    return weights_by_levels(state, part, _build, config, 2 ** len(times))


def _image_weights(state: Mapping[str, torch.Tensor], part: Part, _settings: Mapping[str, Any]) -> Weights | None:
    tensors = part_tensors(state, part)
    steps = sum(key.endswith(("downsample.conv.weight", "upsample.conv.weight")) for key in tensors)
    plain = all(tensor.ndim in (1, 4) for tensor in tensors.values())
    return _weights(state, part, {"times": {part: [0] * steps}, "chunked": False}) if plain and steps else None


def quarter(part: Part, frames: int) -> tuple[Piece, ...]:
    """VAEClass.pieces where each frame of the latent but the first is four frames of pixels.

    An encoder leaves out the last frames of pixels if they make no full frame of the latent, as ComfyUI does.
    """
    if part == "decoder":
        return in_turn(frames, 4 * frames - 3)
    latent = (frames - 1) // 4 + 1
    end = 4 * latent - 3
    chunks = [Span(0, 1), *(Span(start, min(start + 8, end)) for start in range(1, end, 8))]
    return (*(Piece(span, 0) for span in chunks), Piece(Span(end, end), latent))


KL = VAEClass("AutoencoderKL", _image_weights, _build, whole, gathered=("k", "v"))
HUNYUAN_VIDEO = VAEClass("HunyuanVideo", _weights, _build, quarter, gathered=("k", "v"))
