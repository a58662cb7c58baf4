"""What the names and shapes of a VAE's tensors say, where the class on the ranks has its file's names."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .base import Part

QUANT = {"decoder": "post_quant_conv", "encoder": "quant_conv"}


def own_tensors(state: Mapping[str, torch.Tensor], part: Part) -> dict[str, torch.Tensor]:
    """Tensors of one part by the names within it, and of the 1x1 convolution between it and the latent."""
    own = {key.removeprefix(f"{part}."): tensor for key, tensor in state.items() if key.startswith(f"{part}.")}
    return own | {key: tensor for key, tensor in state.items() if key.startswith(f"{QUANT[part]}.")}


def levels(tensors: Mapping[str, torch.Tensor], side: str) -> list[list[int]]:
    """Output channels of the blocks of each level, of `side` "down" or "up"."""
    found: dict[int, dict[int, int]] = {}
    for key, tensor in tensors.items():
        if match := re.fullmatch(rf"{side}\.(\d+)\.block\.(\d+)\.conv1\.(?:conv\.)?weight", key):
            found.setdefault(int(match[1]), {})[int(match[2])] = tensor.shape[0]
    return [[blocks[number] for number in sorted(blocks)] for _level, blocks in sorted(found.items())]


def weight(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Of a convolution that may be wrapped in a causal one."""
    found = tensors.get(f"{name}.weight", tensors.get(f"{name}.conv.weight"))
    assert found is not None, f"no {name}"
    return found


def fitting(
    tensors: Mapping[str, torch.Tensor],
    build: Callable[[Part, dict[str, Any]], nn.Module],
    part: Part,
    config: dict[str, Any],
) -> dict[str, torch.Tensor] | None:
    """The tensors that the module has. None if it lacks one, or has others than these, or of another shape.

    ComfyUI's classes may have layers for a timestep that they never use.
    """
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in build(part, config).state_dict().items()}
    used = {name: tensor for name, tensor in tensors.items() if ".temb_proj." not in name}
    return used if {name: tensor.shape for name, tensor in used.items()} == wanted else None
