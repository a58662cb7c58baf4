"""MiniMax H3's video VAE. Each rank runs the encoder or decoder of diffusers' AutoencoderKLMiniMaxH3 on whole tiles.

Both are made for tiles of 256 x 256 pixels and clips of 17 frames, which do not depend on each other until they are
blended. ComfyUI's class cuts and blends them (nodes/vae/tiles.py).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .base import Part, PartModule, VAEClass, Weights, whole
from .layout import part_tensors

SPACE, TIME = (2, 2, 2, 2, 1, 1), (1, 2, 2, 1, 1, 1)
"""Downsampling factors by level. The weights do not tell them."""
SCALE, FRAMES = 16, 4
"""Rows and columns, and frames, of pixels for each one of the latent."""
HEAD_CHANNELS = 64
_RESNET = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2", "nin_shortcut": "conv_shortcut"}
_BLOCK = {"norm1": "norm1", "norm2": "norm2", "attn.to_out": "attn.to_out.0", "ff.w2": "ff.net.2"}
_ENDS = {"x_embedder": "proj_in", "norm_out": "norm_out", "proj_out": "proj_out"}
_UNUSED = ("mask_token",)


def _weights(state: Mapping[str, torch.Tensor], part: Part, _settings: Mapping[str, Any]) -> Weights | None:
    convert, quant = (_decoder, "post_quant_conv") if part == "decoder" else (_encoder, "quant_conv")
    if f"{quant}.weight" not in state or (converted := convert(part_tensors(state, part))) is None:
        return None
    config, tensors, channels = converted
    tensors = {f"{part}.{name}": tensor for name, tensor in tensors.items()}
    for leaf in ("weight", "bias"):
        tensors[f"{quant}.{leaf}"] = state[f"{quant}.{leaf}"]
    return Weights(config | {"quant": list(state[f"{quant}.weight"].shape[:2])}, tensors, SCALE, channels)


Converted = tuple[dict[str, Any], dict[str, torch.Tensor], int] | None
"""Config, tensors and channels of the output."""


def _encoder(originals: Mapping[str, torch.Tensor]) -> Converted:
    tensors = {}
    for key, tensor in originals.items():
        name, _, leaf = key.rpartition(".")
        target: str | None = name if name in ("conv_in", "norm_out", "conv_out") else None
        if (match := re.fullmatch(r"down\.(\d+)\.block\.(\d+)\.(\w+)", name)) and match[3] in _RESNET:
            target = f"down_blocks.{match[1]}.resnets.{match[2]}.{_RESNET[match[3]]}"
        elif match := re.fullmatch(r"down\.(\d+)\.downsample\.conv", name):
            target = f"down_blocks.{match[1]}.downsamplers.0.conv"
        if target is None or leaf not in ("weight", "bias"):
            return None
        tensors[f"{target}.{leaf}"] = tensor
    widths = [tensors[f"down_blocks.{level}.resnets.0.conv1.weight"].shape[0] for level in range(len(SPACE))]
    blocks = [name for name in tensors if re.fullmatch(r"down_blocks\.0\.resnets\.\d+\.conv1\.weight", name)]
    channels = tensors["conv_out.weight"].shape[0]
    config = {
        "in_channels": tensors["conv_in.weight"].shape[1],
        "out_channels": channels,
        "block_out_channels": widths,
        "layers_per_block": len(blocks),
    }
    return config, tensors, channels


def _decoder(originals: Mapping[str, torch.Tensor]) -> Converted:
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in originals.items():
        name, _, leaf = key.rpartition(".")
        match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
        block, layer = (f"transformer_blocks.{match[1]}", match[2]) if match else ("", "")
        if key in _UNUSED:
            continue
        if re.fullmatch(r"register_tokens|transformer_blocks\.\d+\.scale[12]", key):
            tensors[key] = tensor
        elif leaf not in ("weight", "bias"):
            return None
        elif name in _ENDS:
            tensors[f"{_ENDS[name]}.{leaf}"] = tensor
        elif layer == "attn.to_qkv":  # each head's query, key and value follow each other
            heads = tensor.unflatten(0, (-1, 3, HEAD_CHANNELS))
            for index, target in enumerate(("to_q", "to_k", "to_v")):
                tensors[f"{block}.attn.{target}.{leaf}"] = heads[:, index].flatten(0, 1).contiguous()
        elif layer == "ff.w1":  # gate and value, which diffusers has in the other order
            gate, value = tensor.chunk(2)
            tensors[f"{block}.ff.net.0.proj.{leaf}"] = torch.cat((value, gate))
        elif layer in _BLOCK:
            tensors[f"{block}.{_BLOCK[layer]}.{leaf}"] = tensor
        else:
            return None
    width = tensors["proj_in.weight"].shape[0]
    channels = tensors["proj_out.weight"].shape[0] // (FRAMES * SCALE**2)
    config = {
        "in_channels": tensors["proj_in.weight"].shape[1],
        "out_channels": channels,
        "num_layers": len({name.split(".")[1] for name in tensors if name.startswith("transformer_blocks.")}),
        "num_attention_heads": width // HEAD_CHANNELS,
        "num_register_tokens": tensors["register_tokens"].shape[1],
    }
    return config, tensors, channels


class _Decoder(PartModule):
    """A tile of a clip of the latent [1, C, T, H, W] -> raw pixels [1, 3, 4 T, 16 H, 16 W]."""

    def __init__(self, quant: list[int], **config: Any):
        from diffusers.models.autoencoders import autoencoder_kl_minimax_h3 as h3

        super().__init__()
        self.post_quant_conv = nn.Conv3d(quant[1], quant[0], 1)
        self.decoder = h3.MiniMaxH3VideoViTDecoder3d(attention_head_dim=HEAD_CHANNELS, **config)
        with torch.device("cpu"):  # a table that no file has: it would stay on the meta device
            self.decoder.rope = h3.MiniMaxH3VideoRotaryPosEmbed(self.decoder.rope.inv_freq.shape[0] * 6)

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(x))


class _Encoder(PartModule):
    """A tile of a clip of pixels [1, 3, T, 16 H, 16 W] -> moments [1, 2 C, frames, H, W]."""

    def __init__(self, quant: list[int], **config: Any):
        from diffusers.models.autoencoders import autoencoder_kl_minimax_h3 as h3

        super().__init__()
        self.encoder = h3.MiniMaxH3VideoEncoder3d(
            **config, spatial_downsample_factors=SPACE, temporal_downsample_factors=TIME
        )
        self.quant_conv = nn.Conv3d(quant[1], quant[0], 1)

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        return self.quant_conv(self.encoder(x))


def _build(part: Part, config: dict[str, Any]) -> PartModule:
    return (_Decoder if part == "decoder" else _Encoder)(**config)


MINIMAX_H3 = VAEClass("AutoencoderKLMiniMaxH3", _weights, _build, whole, independent=True)
