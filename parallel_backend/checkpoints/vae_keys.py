"""Weight names of an image VAE's decoder: from the original (LDM) layout, which ComfyUI has, to diffusers' Decoder."""

import re
from collections.abc import Mapping

import torch

POST_QUANT = "post_quant_conv"
DECODER = "decoder."

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
