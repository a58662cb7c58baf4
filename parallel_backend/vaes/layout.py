"""Reads a VAE's settings from the names and shapes of its tensors, for classes whose module names are the file's."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .base import Part, Weights

QUANT = {"decoder": "post_quant_conv", "encoder": "quant_conv"}


def part_tensors(state: Mapping[str, torch.Tensor], part: Part) -> dict[str, torch.Tensor]:
    """The tensors of one part, by the rest of their names."""
    return {key.removeprefix(f"{part}."): tensor for key, tensor in state.items() if key.startswith(f"{part}.")}


def with_quant_conv(state: Mapping[str, torch.Tensor], part: Part) -> dict[str, torch.Tensor]:
    """`part_tensors`, and the tensors of the 1x1 convolution between the part and the latent."""
    quant = {key: tensor for key, tensor in state.items() if key.startswith(f"{QUANT[part]}.")}
    return part_tensors(state, part) | quant


def levels(tensors: Mapping[str, torch.Tensor], part: Part) -> list[list[int]]:
    """Output channels of the blocks of each level."""
    channels: dict[int, dict[int, int]] = {}
    side = "down" if part == "encoder" else "up"
    for key, tensor in tensors.items():
        if match := re.fullmatch(rf"{side}\.(\d+)\.block\.(\d+)\.conv1\.(?:conv\.|1\.conv3d\.)?weight", key):
            channels.setdefault(int(match[1]), {})[int(match[2])] = tensor.shape[0]
    return [[blocks[number] for number in sorted(blocks)] for _level, blocks in sorted(channels.items())]


def fitting(
    tensors: Mapping[str, torch.Tensor],
    build: Callable[[Part, dict[str, Any]], nn.Module],
    part: Part,
    config: dict[str, Any],
) -> dict[str, torch.Tensor] | None:
    """The tensors that the module uses. None if their names or shapes are not exactly the module's."""
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in build(part, config).state_dict().items()}
    # ComfyUI's classes may have layers for a timestep, which they never use.
    used = {name: tensor for name, tensor in tensors.items() if ".temb_proj." not in name}
    return used if {name: tensor.shape for name, tensor in used.items()} == wanted else None


def weights_by_levels(
    state: Mapping[str, torch.Tensor],
    part: Part,
    build: Callable[[Part, dict[str, Any]], nn.Module],
    settings: Mapping[str, Any],
    scale: int,
) -> Weights | None:
    """VAEClass.weights of a part in latent diffusion's layout. Its config has what the tensors tell, and `settings`."""
    tensors = with_quant_conv(state, part)
    blocks = levels(tensors, part)
    if not blocks:
        return None
    first, last = _convolution(tensors, "conv_in"), _convolution(tensors, "conv_out")
    # The encoder's last convolution gives means and variances of the latent.
    pixels, z = (first.shape[1], last.shape[0] // 2) if part == "encoder" else (last.shape[0], first.shape[1])
    widths = [level[-1] for level in blocks]
    config = {"channels": pixels, "z": z, "widths": widths, "layers": len(blocks[0]), **settings}
    used = fitting(tensors, build, part, config)
    return None if used is None else Weights(config, used, scale, z if part == "encoder" else pixels)


def _convolution(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The weight of a convolution, which may be wrapped in a causal one."""
    return tensors[f"{name}.weight"] if f"{name}.weight" in tensors else tensors[f"{name}.conv.weight"]
