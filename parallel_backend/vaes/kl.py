"""AutoencoderKL, the VAE of images: SD, SDXL, SD3, Flux, Flux.2 and others. Ranks run diffusers' Decoder, and
an encoder under the names of the files."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import ldm
from .base import Part, VAEClass, Weights, whole

POST_QUANT = "post_quant_conv"
DECODER = "decoder."

GROUPS = 32
"""Groups of every GroupNorm. The weights do not tell."""
_RESNET = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2", "nin_shortcut": "conv_shortcut"}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_ENDS = {"conv_in": "conv_in", "norm_out": "conv_norm_out", "conv_out": "conv_out"}


def _module(name: str, levels: int) -> str | None:
    """diffusers' name of module `name` of a decoder with `levels` levels. None if diffusers has no such module."""
    if name in _ENDS:
        return _ENDS[name]
    if (found := re.fullmatch(r"mid\.block_([12])\.(\w+)", name)) and found[2] in _RESNET:
        return f"mid_block.resnets.{int(found[1]) - 1}.{_RESNET[found[2]]}"
    if (found := re.fullmatch(r"mid\.attn_1\.(\w+)", name)) and found[1] in _ATTENTION:
        return f"mid_block.attentions.0.{_ATTENTION[found[1]]}"
    if (found := re.fullmatch(r"up\.(\d+)\.block\.(\d+)\.(\w+)", name)) and found[3] in _RESNET:
        return f"up_blocks.{levels - 1 - int(found[1])}.resnets.{found[2]}.{_RESNET[found[3]]}"
    if found := re.fullmatch(r"up\.(\d+)\.upsample\.conv", name):
        return f"up_blocks.{levels - 1 - int(found[1])}.upsamplers.0.conv"
    return None


def to_diffusers(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """`decoder.*` and `post_quant_conv.*` of a VAE in original layout -> the same tensors under diffusers' names.

    Other keys, such as the encoder's, are dropped. None if a module of the decoder is unknown, as in video VAEs. Such a
    decoder cannot be cut.
    """
    numbers = [int(found[1]) for key in state if (found := re.match(r"decoder\.up\.(\d+)\.", key))]
    tensors = {}
    for key, tensor in state.items():
        name, _, leaf = key.rpartition(".")
        if name == POST_QUANT:
            target: str | None = POST_QUANT
        elif key.startswith(DECODER):
            target = _module(name.removeprefix(DECODER), max(numbers, default=0) + 1)
            target = None if target is None else DECODER + target
        else:
            continue
        if target is None or leaf not in ("weight", "bias") or tensor.ndim not in (1, 4):
            return None
        linear = ".attentions." in target and tensor.ndim == 4  # 1x1 convolutions, which diffusers has as linear layers
        tensors[f"{target}.{leaf}"] = tensor[:, :, 0, 0] if linear else tensor
    return tensors or None


def _weights(state: Mapping[str, torch.Tensor], part: Part, _settings: Mapping[str, Any]) -> Weights | None:
    if part == "encoder":
        quant = f"{ldm.QUANT[part]}.weight"
        steps = sum(key.endswith(".downsample.conv.weight") for key in state if key.startswith("encoder."))
        plain = all(tensor.ndim in (1, 4) for key, tensor in state.items() if key.startswith("encoder.") or key == quant)
        settings = {"times": {part: [0] * steps}, "chunked": False}
        return ldm.weights(state, part, settings) if plain and steps else None
    tensors = to_diffusers(state)
    if tensors is None:
        return None

    def first(name: str) -> torch.Tensor:
        return tensors[f"{DECODER}{name}.weight"]

    def count(pattern: str) -> int:
        index = 0
        while f"{DECODER}{pattern.format(index)}.conv1.weight" in tensors:
            index += 1
        return index

    levels = count("up_blocks.{}.resnets.0")
    widths = [first(f"up_blocks.{level}.resnets.0.conv1").shape[0] for level in range(levels)]
    quant = tensors.get(f"{POST_QUANT}.weight")
    config = {
        "in_channels": first("conv_in").shape[1],
        "out_channels": first("conv_out").shape[0],
        "block_out_channels": widths[::-1],
        "layers_per_block": count("up_blocks.0.resnets.{}") - 1,
        "post_quant": None if quant is None else list(quant.shape[:2]),
    }
    return Weights(config, tensors, 2 ** (levels - 1), config["out_channels"])


class _Decoder(nn.Module):
    """diffusers' Decoder, with the 1x1 convolution before it that some VAEs have: [B, C, H, W] -> [B, 3, 8 H, 8 W]."""

    def __init__(self, post_quant: list[int] | None, block_out_channels: list[int], **config: Any):
        from diffusers.models.autoencoders.vae import Decoder  # imports every autoencoder there is

        super().__init__()
        self.post_quant_conv = nn.Identity() if post_quant is None else nn.Conv2d(post_quant[1], post_quant[0], 1)
        self.decoder = Decoder(
            up_block_types=("UpDecoderBlock2D",) * len(block_out_channels),
            block_out_channels=tuple(block_out_channels),
            norm_num_groups=GROUPS,
            **config,
        )

    def forward(self, x: torch.Tensor, _first: bool) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(x))

    def reset(self) -> None:
        """Nothing is kept of a picture."""


def _build(part: Part, config: dict[str, Any]) -> nn.Module:
    return _Decoder(**config) if part == "decoder" else ldm.build(part, config)


KL = VAEClass("AutoencoderKL", _weights, _build, whole, gathered=("to_k", "to_v", "k", "v"))
