"""MiniMax H3's video VAE. Ranks run the encoder and decoder of diffusers' AutoencoderKLMiniMaxH3, each on tiles of its own.

Both are made for tiles of 256 x 256 pixels and clips of 17 frames, which have nothing to do with each other until they are
blended. ComfyUI's own class cuts and blends (nodes/vae/tiles.py).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .base import Part, VAEClass, Weights, whole

SPACE, TIME = (2, 2, 2, 2, 1, 1), (1, 2, 2, 1, 1, 1)
"""Downsampling by level. The weights do not tell."""
SCALE, FRAMES = 16, 4
HEAD_CHANNELS = 64
_RESNET = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2", "nin_shortcut": "conv_shortcut"}
_BLOCK = {"norm1": "norm1", "norm2": "norm2", "attn.to_out": "attn.to_out.0", "ff.w2": "ff.net.2"}
_ENDS = {"x_embedder": "proj_in", "norm_out": "norm_out", "proj_out": "proj_out"}
_UNUSED = ("mask_token",)


def _weights(state: Mapping[str, torch.Tensor], part: Part, _settings: Mapping[str, Any]) -> Weights | None:
    own = {key.removeprefix(f"{part}."): tensor for key, tensor in state.items() if key.startswith(f"{part}.")}
    convert, quant = (_decoder, "post_quant_conv") if part == "decoder" else (_encoder, "quant_conv")
    if f"{quant}.weight" not in state or (found := convert(own)) is None:
        return None
    config, tensors, channels = found
    tensors = {f"{part}.{name}": tensor for name, tensor in tensors.items()}
    for leaf in ("weight", "bias"):
        tensors[f"{quant}.{leaf}"] = state[f"{quant}.{leaf}"]
    return Weights(config | {"quant": list(state[f"{quant}.weight"].shape[:2])}, tensors, SCALE, channels)


Converted = tuple[dict[str, Any], dict[str, torch.Tensor], int] | None
"""Config, tensors and channels of the output."""


def _encoder(own: Mapping[str, torch.Tensor]) -> Converted:
    tensors = {}
    for key, tensor in own.items():
        name, _, leaf = key.rpartition(".")
        target: str | None = name if name in ("conv_in", "norm_out", "conv_out") else None
        if (found := re.fullmatch(r"down\.(\d+)\.block\.(\d+)\.(\w+)", name)) and found[3] in _RESNET:
            target = f"down_blocks.{found[1]}.resnets.{found[2]}.{_RESNET[found[3]]}"
        elif found := re.fullmatch(r"down\.(\d+)\.downsample\.conv", name):
            target = f"down_blocks.{found[1]}.downsamplers.0.conv"
        if target is None or leaf not in ("weight", "bias"):
            return None
        tensors[f"{target}.{leaf}"] = tensor
    widths = [tensors[f"down_blocks.{level}.resnets.0.conv1.weight"].shape[0] for level in range(len(SPACE))]
    config = {
        "in_channels": tensors["conv_in.weight"].shape[1],
        "out_channels": tensors["conv_out.weight"].shape[0],
        "block_out_channels": widths,
        "layers_per_block": sum(
            bool(re.fullmatch(r"down_blocks\.0\.resnets\.\d+\.conv1\.weight", name)) for name in tensors
        ),
    }
    return config, tensors, config["out_channels"]


def _decoder(own: Mapping[str, torch.Tensor]) -> Converted:
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in own.items():
        name, _, leaf = key.rpartition(".")
        found = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
        block = f"transformer_blocks.{found[1]}" if found else ""
        if key in _UNUSED:
            continue
        if re.fullmatch(r"register_tokens|transformer_blocks\.\d+\.scale[12]", key):
            tensors[key] = tensor
        elif leaf not in ("weight", "bias"):
            return None
        elif name in _ENDS:
            tensors[f"{_ENDS[name]}.{leaf}"] = tensor
        elif found and found[2] == "attn.to_qkv":  # a head's query, key and value stand together
            heads = tensor.unflatten(0, (-1, 3, HEAD_CHANNELS))
            for index, target in enumerate(("to_q", "to_k", "to_v")):
                tensors[f"{block}.attn.{target}.{leaf}"] = heads[:, index].flatten(0, 1).contiguous()
        elif found and found[2] == "ff.w1":  # gate and value, which diffusers has the other way round
            gate, value = tensor.chunk(2)
            tensors[f"{block}.ff.net.0.proj.{leaf}"] = torch.cat((value, gate))
        elif found and found[2] in _BLOCK:
            tensors[f"{block}.{_BLOCK[found[2]]}.{leaf}"] = tensor
        else:
            return None
    width, pixels = tensors["proj_in.weight"].shape[0], FRAMES * SCALE**2
    config = {
        "in_channels": tensors["proj_in.weight"].shape[1],
        "out_channels": tensors["proj_out.weight"].shape[0] // pixels,
        "num_layers": len({name.split(".")[1] for name in tensors if name.startswith("transformer_blocks.")}),
        "num_attention_heads": width // HEAD_CHANNELS,
        "num_register_tokens": tensors["register_tokens"].shape[1],
    }
    return config, tensors, config["out_channels"]


class _Decoder(nn.Module):
    """A tile of a clip of the latent [1, C, T, H, W] -> raw pixels [1, 3, 4 T, 16 H, 16 W]."""

    def __init__(self, quant: list[int], **config: Any):
        from diffusers.models.autoencoders import autoencoder_kl_minimax_h3 as h3

        super().__init__()
        self.post_quant_conv = nn.Conv3d(quant[1], quant[0], 1)
        self.decoder = h3.MiniMaxH3VideoViTDecoder3d(attention_head_dim=HEAD_CHANNELS, **config)
        with torch.device("cpu"):  # its table is in no file
            self.decoder.rope = h3.MiniMaxH3VideoRotaryPosEmbed(self.decoder.rope.inv_freq.shape[0] * 6)

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(x))

    def reset(self) -> None:
        """Nothing is kept of a tile."""


class _Encoder(nn.Module):
    """A tile of a clip of pixels [1, 3, T, 16 H, 16 W] -> moments [1, 2 C, frames, H, W]."""

    def __init__(self, quant: list[int], **config: Any):
        from diffusers.models.autoencoders import autoencoder_kl_minimax_h3 as h3

        super().__init__()
        scales = {"spatial_downsample_factors": SPACE, "temporal_downsample_factors": TIME}
        self.encoder = h3.MiniMaxH3VideoEncoder3d(**config, **scales)
        self.quant_conv = nn.Conv3d(quant[1], quant[0], 1)

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        return self.quant_conv(self.encoder(x))

    def reset(self) -> None:
        """Nothing is kept of a tile."""


def _build(part: Part, config: dict[str, Any]) -> nn.Module:
    return (_Decoder if part == "decoder" else _Encoder)(**config)


MINIMAX_H3 = VAEClass("AutoencoderKLMiniMaxH3", _weights, _build, whole, independent=True)
