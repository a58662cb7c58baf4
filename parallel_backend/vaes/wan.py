"""The VAE of Wan 2.1, Wan 2.2 and Qwen-Image. Ranks run the encoder and decoder of diffusers' AutoencoderKLWan.

A piece is one frame of the latent. Convolutions are causal in time, and each keeps the last two frames of its input for the
next piece, so that a video in pieces has the result of the whole video. The first frame is a piece of pixels alone.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallel_backend.core.spans import Span

from .base import Edges, Part, PartModule, Piece, VAEClass, Weights, set_edges
from .layout import part_tensors

FRAMES = 4
"""Frames of pixels for each frame of the latent. The first frame of the latent has one."""
_RESIDUAL = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2"}
_RESIDUAL |= {"shortcut": "conv_shortcut"}
_ENDS = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_QUANT = {"decoder": ("conv2", "post_quant_conv"), "encoder": ("conv1", "quant_conv")}


class _Names:
    """diffusers' names of the modules of one part. `state`: the part's tensors by their original names (part_tensors)."""

    def __init__(self, state: Mapping[str, torch.Tensor], part: Part):
        self.decodes = part == "decoder"
        self.samples = "upsamples" if self.decodes else "downsamples"
        indices = {int(match[1]) for key in state if (match := re.match(rf"{self.samples}\.(\d+)\.", key))}
        self.residual = any(key.startswith(f"{self.samples}.0.{self.samples}.") for key in state)
        """Each level is a block with a shortcut (Wan 2.2). Elsewhere all levels' layers are in one list."""
        layers = max(indices, default=-1) + 1
        resampling = f"{self.samples}.0.{self.samples}.{{}}.resample" if self.residual else f"{self.samples}.{{}}.resample"
        self.residuals = next((index for index in range(99) if f"{resampling.format(index)}.1.weight" in state), 0)
        """Residual layers of a level: its resampling layer follows them."""
        self.levels = layers if self.residual else (layers + 1) // (self.residuals + 1)

    def module(self, name: str) -> str | None:
        """diffusers' name. None if diffusers has no such module."""
        if name in _ENDS:
            return _ENDS[name]
        if match := re.fullmatch(r"middle\.([012])\.(.+)", name):
            layer = match[2] if match[1] == "1" else _RESIDUAL.get(match[2])
            return None if layer is None else f"mid_block.{_MIDDLE[match[1]]}.{layer}"
        if self.residual and (match := re.fullmatch(rf"{self.samples}\.(\d+)\.{self.samples}\.(\d+)\.(.+)", name)):
            return self._layer(int(match[1]), int(match[2]), match[3])
        if not self.residual and (match := re.fullmatch(rf"{self.samples}\.(\d+)\.(.+)", name)):
            if not self.decodes:  # diffusers' encoder has all levels' layers in one list too
                layer = match[2] if match[2] in ("resample.1", "time_conv") else _RESIDUAL.get(match[2])
                return None if layer is None else f"down_blocks.{match[1]}.{layer}"
            return self._layer(*divmod(int(match[1]), self.residuals + 1), match[2])
        return None

    def _layer(self, level: int, index: int, name: str) -> str | None:
        block = f"{'up' if self.decodes else 'down'}_blocks.{level}"
        if index == self.residuals:
            sampler = ("upsampler" if self.decodes else "downsampler") if self.residual else "upsamplers.0"
            return f"{block}.{sampler}.{name}" if name in ("resample.1", "time_conv") else None
        return f"{block}.resnets.{index}.{_RESIDUAL[name]}" if name in _RESIDUAL else None

    def resampler(self, level: int) -> str:
        """Original name of the resampling layer that ends a level."""
        within = f"{self.samples}.{level}.{self.samples}.{self.residuals}"
        return within if self.residual else f"{self.samples}.{level * (self.residuals + 1) + self.residuals}"


def _weights(state: Mapping[str, torch.Tensor], part: Part, _settings: Mapping[str, Any]) -> Weights | None:
    old, new = _QUANT[part]
    originals = part_tensors(state, part)
    if "conv1.weight" not in originals or f"{old}.weight" not in state:
        return None
    names, tensors = _Names(originals, part), {}
    for key, tensor in originals.items():
        name, _, leaf = key.rpartition(".")
        target = names.module(name)
        if target is None or leaf not in ("weight", "bias", "gamma"):
            return None
        tensors[f"{part}.{target}.{leaf}"] = tensor
    for leaf in ("weight", "bias"):
        tensors[f"{new}.{leaf}"] = state[f"{old}.{leaf}"]
    config = _config(names, originals, state[f"{old}.weight"].shape[0])
    patch = config["patch"]
    channels = originals["head.2.weight"].shape[0] // patch**2 if names.decodes else config["z_dim"]
    return Weights(config, tensors, 2 ** (names.levels - 1) * patch, channels)


def _config(names: _Names, originals: Mapping[str, torch.Tensor], latent: int) -> dict[str, Any]:
    """Settings from the tensors' shapes. `latent`: channels of the convolution between the latent and the part."""
    samplers = [names.resampler(level) for level in range(names.levels - 1)]
    inside = f"{names.samples}.{{}}.{names.samples}.0" if names.residual else f"{names.samples}.{{}}"
    step = 1 if names.residual else names.residuals + 1
    widths = [originals[f"{inside.format(level * step)}.residual.6.weight"].shape[0] for level in range(names.levels)]
    base = min(widths)
    # In Wan 2.2 these hold squares of 2 x 2 pixels. Counted from the shapes, since a picture may have 3 or 4 channels.
    channels = originals["head.2.weight"].shape[0] if names.decodes else originals["conv1.weight"].shape[1]
    return {
        "dim": base,
        "z_dim": latent if names.decodes else latent // 2,
        "dim_mult": [width // base for width in (reversed(widths) if names.decodes else widths)],
        "num_res_blocks": names.residuals - 1 if names.decodes else names.residuals,
        "in_time": [f"{name}.time_conv.weight" in originals for name in samplers],
        "channels": channels,
        "is_residual": names.residual,
        "patch": 2 if names.residual else 1,
    }


@functools.cache
def _classes() -> tuple[type[nn.Module], type[nn.Module]]:
    """diffusers' causal convolution and attention, changed for bands."""
    from diffusers.models.autoencoders import autoencoder_kl_wan as wan

    class CausalConv3d(wan.WanCausalConv3d):
        """Pads in time alone: torch's convolution pads in space, and the input is copied once instead of twice."""

        def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
            """[B, C, frames, rows, columns]. `cache_x`: the frames before x."""
            # Before the video, a causal convolution sees zeros in place of the frames that no piece has left.
            missing = self._padding[4] - (0 if cache_x is None else cache_x.shape[2])
            if self._padding[4]:
                zeros = [x.new_zeros((*x.shape[:2], missing, *x.shape[3:]))] if missing > 0 else []
                x = torch.cat([*zeros, *([] if cache_x is None else [cache_x]), x], dim=2)
            return nn.Conv3d.forward(self, x)

    class Attention(wan.WanAttentionBlock):
        """Attends to keys and values of the whole frame, which `everywhere` gathers."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[B, C, frames, rows, columns] -> the same shape."""
            batch, channels, frames, height, width = x.shape
            normed = self.norm(x.transpose(1, 2).reshape(batch * frames, channels, height, width))
            query, both = self.to_qkv(normed).split((channels, 2 * channels), dim=1)
            key, value = self.everywhere(both).flatten(2).transpose(1, 2).chunk(2, dim=2)
            query = query.flatten(2).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
            out = self.proj(out.transpose(1, 2).reshape(batch * frames, channels, height, width))
            return out.view(batch, frames, channels, height, width).transpose(1, 2) + x

    return CausalConv3d, Attention


def for_bands(model: nn.Module) -> None:
    """Have the convolutions do all padding in space, and attention ask for the other bands' keys and values."""
    from diffusers.models.autoencoders import autoencoder_kl_wan as wan

    causal, attention = _classes()
    for module in model.modules():
        if type(module) is wan.WanCausalConv3d:
            module.__class__, module.padding = causal, (0, module._padding[2], module._padding[0])
        elif type(module) is wan.WanAttentionBlock:
            module.__class__, module.everywhere = attention, lambda x: x
        elif type(module) is wan.WanResample and module.mode.startswith("downsample"):
            module.resample[0] = nn.Identity()
            set_edges(module.resample[1], Edges(0, 1, 0, 1))
        elif type(module) is wan.WanUpsample:
            module.__class__ = nn.Upsample  # diffusers' class would copy 16-bit values to 32 bits


class _Part(PartModule):
    """One part of diffusers' AutoencoderKLWan, and the frames that its causal convolutions keep of earlier pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Drop the frames of earlier pieces."""
        self._caches: list[Any] = []

    def _causal(self, model: nn.Module, x: torch.Tensor, **more: Any) -> torch.Tensor:
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

        if not self._caches:
            self._caches = [None] * sum(isinstance(module, WanCausalConv3d) for module in model.modules())
        return model(x, feat_cache=self._caches, feat_idx=[0], **more)


class _Decoder(_Part):
    """A frame of the latent [B, C, 1, H, W] -> 4 frames of pixels (the first frame: 1) [B, 3, frames, 8 H, 8 W]."""

    def __init__(self, z_dim: int, channels: int, in_time: list[bool], patch: int, **config: Any):
        from diffusers.models.autoencoders import autoencoder_kl_wan as wan

        super().__init__()
        self._patch, self._unpatchify = patch, wan.unpatchify
        self.post_quant_conv = wan.WanCausalConv3d(z_dim, z_dim, 1)
        self.decoder = wan.WanDecoder3d(z_dim=z_dim, out_channels=channels, temperal_upsample=in_time, **config)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return self._unpatchify(self._causal(self.decoder, self.post_quant_conv(x), first_chunk=first), self._patch)


class _Encoder(_Part):
    """4 frames of pixels (at first 1) [B, 3, frames, 8 H, 8 W] -> means of a frame of the latent [B, C, 1, H, W]."""

    def __init__(self, z_dim: int, channels: int, in_time: list[bool], patch: int, **config: Any):
        from diffusers.models.autoencoders import autoencoder_kl_wan as wan

        super().__init__()
        self._patch, self._patchify = patch, wan.patchify
        self.encoder = wan.WanEncoder3d(in_channels=channels, z_dim=2 * z_dim, temperal_downsample=in_time, **config)
        self.quant_conv = wan.WanCausalConv3d(2 * z_dim, 2 * z_dim, 1)

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        return self.quant_conv(self._causal(self.encoder, self._patchify(x, self._patch))).chunk(2, dim=1)[0]


def _build(part: Part, config: dict[str, Any]) -> PartModule:
    model = (_Decoder if part == "decoder" else _Encoder)(**config)
    for_bands(model)
    return model


def _pieces(part: Part, frames: int) -> tuple[Piece, ...]:
    if part == "decoder":
        return tuple(Piece(Span(index, index + 1), FRAMES if index else 1) for index in range(frames))
    later = range(1, frames - FRAMES + 1, FRAMES)
    return (Piece(Span(0, 1), 1), *(Piece(Span(start, start + FRAMES), 1) for start in later))


WAN = VAEClass("AutoencoderKLWan", _weights, _build, _pieces)
