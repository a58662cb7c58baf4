"""Cosmos' video tokenizer (arXiv 2501.03575), read in ComfyUI's layout. Ranks run diffusers' equal encoder and decoder."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.spans import Span

from .base import Edges, Part, PartModule, Piece, VAEClass, Weights, set_edges
from .layout import QUANT, fitting, levels, with_quant_conv

PER_LATENT = 8
"""Frames, rows and columns of pixels for each one of the latent. The first frame is alone in both."""

_RENAMED = (
    (r"\.conv3d\.", "."),
    (r"(^|\.)(conv_in|conv_out|conv1|conv2)\.0\.", r"\1\2.conv_s."),
    (r"(^|\.)(conv_in|conv_out|conv1|conv2)\.1\.", r"\1\2.conv_t."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"^mid\.block_1\.", "mid_block.resnets.0."),
    (r"^mid\.block_2\.", "mid_block.resnets.1."),
    (r"^mid\.attn_1\.0\.", "mid_block.attentions.0."),
    (r"^mid\.attn_1\.1\.", "mid_block.temp_attentions.0."),
    (r"\.([qkv])\.", r".to_\1."),
    (r"\.proj_out\.", ".to_out.0."),
    (r"^down\.(\d+)\.block\.", r"down_blocks.\1.resnets."),
    (r"^down\.(\d+)\.downsample\.", r"down_blocks.\1.downsamplers.0."),
    (r"^up\.(\d+)\.block\.", r"up_blocks.\1.resnets."),
    (r"^up\.(\d+)\.upsample\.", r"up_blocks.\1.upsamplers.0."),
)


def _renamed(name: str, levels: int) -> str:
    """diffusers' name, which counts the decoder's levels from the other end."""
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    return re.sub(r"^up_blocks\.(\d+)\.", lambda match: f"up_blocks.{levels - 1 - int(match[1])}.", name)


def _weights(state: Mapping[str, torch.Tensor], part: Part, _settings: Mapping[str, Any]) -> Weights | None:
    tensors = with_quant_conv(state, part)
    blocks, quant_name = levels(tensors, part), f"{QUANT[part]}.conv3d.weight"
    if not blocks or quant_name not in tensors:
        return None
    widths, first, encodes = [level[-1] for level in blocks], tensors["conv_in.0.conv3d.weight"].shape[0], part == "encoder"
    latent_channels = tensors[quant_name].shape[0 if encodes else 1]
    config = {
        "latent_channels": latent_channels,
        "widths": [first, *widths] if encodes else [*widths, first],
        "layers": len(blocks[0]),
    }
    renamed = {_renamed(key, len(blocks)): tensor for key, tensor in tensors.items() if "patcher3d." not in key}
    renamed = {key if key.startswith(QUANT[part]) else f"body.{key}": tensor for key, tensor in renamed.items()}
    used = fitting(renamed, _build, part, config)
    return None if used is None else Weights(config, used, PER_LATENT, latent_channels if encodes else 3)


@functools.cache
def _classes() -> Mapping[str, type[nn.Module]]:
    """diffusers' modules for bands: convolutions do all padding in space, and keys and values are of all bands."""
    from diffusers.models.autoencoders import autoencoder_kl_cosmos as cosmos

    class Downsample(cosmos.CosmosDownsample3d):
        """Leaves the padding behind the picture, which pooling does not reach, to the first convolution."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.spatial_downsample:
                x = self.conv1(x) + F.avg_pool3d(x, (1, 2, 2), (1, 2, 2))
            if self.temporal_downsample:
                x = torch.cat((x[:, :, :1], x), dim=2)
                x = self.conv2(x) + F.avg_pool3d(x, (2, 1, 1), (2, 1, 1))
            return self.conv3(x)

    class Keys(cosmos.CosmosCausalConv3d):
        """Keys or values of the attention over a frame."""

        @staticmethod
        def everywhere(local: torch.Tensor) -> torch.Tensor:
            return local

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.everywhere(super().forward(x))

    return {
        "convolution": cosmos.CosmosCausalConv3d,
        "downsample": Downsample,
        "keys": Keys,
        "encoder": cosmos.CosmosEncoder3d,
        "decoder": cosmos.CosmosDecoder3d,
    }


class _Coder(PartModule):
    """[B, 3, 8 n + 1, H, W] -> [B, C, n + 1, H / 8, W / 8], or back, with the 1x1 convolution at the latent's end."""

    def __init__(self, part: Part, latent_channels: int, widths: list[int], layers: int):
        super().__init__()
        classes, encodes = _classes(), part == "encoder"
        self.body = classes[part](
            3 if encodes else latent_channels,
            latent_channels if encodes else 3,
            tuple(widths),
            num_resnet_blocks=layers if encodes else layers - 1,
        )
        quant = classes["convolution"](latent_channels, latent_channels, kernel_size=1, padding=0)
        self.order = ("body", QUANT[part]) if encodes else (QUANT[part], "body")
        self.add_module(QUANT[part], quant)
        for name, module in list(self.named_modules()):
            if isinstance(module, classes["convolution"]):
                # With stride 2 the layer around the convolution pads in diffusers.
                set_edges(module, Edges(0, 1, 0, 1) if module.stride[-1] == 2 else Edges(*module.spatial_pad))
                module.spatial_pad = (0, 0, 0, 0)
                if ".attentions." in name and name.endswith((".to_k", ".to_v")):
                    module.__class__ = classes["keys"]
            elif type(module).__name__ == "CosmosDownsample3d":
                module.__class__ = classes["downsample"]
            elif hasattr(module, "wavelets"):  # tables that no file has: they would stay on the meta device
                module.wavelets = torch.full((2,), 0.5**0.5, device="cpu")
                module._arange = torch.arange(2, device="cpu")

    def forward(self, x: torch.Tensor, _first: bool = True) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def _build(part: Part, config: dict[str, Any]) -> PartModule:
    return _Coder(part, **config)


def _pieces(part: Part, frames: int) -> tuple[Piece, ...]:
    """The whole video at once, as in ComfyUI."""
    per = PER_LATENT
    return (Piece(Span(0, frames), (frames - 1) // per + 1 if part == "encoder" else per * (frames - 1) + 1),)


COSMOS = VAEClass("Cosmos", _weights, _build, _pieces)
