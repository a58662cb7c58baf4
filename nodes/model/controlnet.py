"""Outputs of ComfyUI's ControlNets as residuals by block, for the ranks."""

from typing import NoReturn

import torch

from parallel_backend.client.call import Residuals
from parallel_backend.families import Family
from parallel_backend.families.base.step_inputs import Config

Control = dict[str, list[torch.Tensor | None]]
"""The result of ComfyUI's `get_control`: "input", "middle" or "output" -> for each block [B, tokens, hidden] or None.

Tokens are in the native model's order: (frames,) rows, columns."""


def residuals(
    family: Family, config: Config, control: Control | None, shape: tuple[int, ...], along: str = "rows"
) -> Residuals:
    """Block "<list>.<index>" -> residual [B, tokens, hidden] that is added behind the block.

    `shape`: of the latent, or of a band of it. Tokens are in the order of `Patching.pack` for bands along the axis `along`.
    ValueError for outputs that the family does not take, and for outputs of another model's size.
    """
    patching = family.patching.cut(along)
    grid = patching.grid(shape)
    counts, order = family.blocks.counts(config), patching.order(grid)
    size = (shape[0], torch.Size(grid).numel(), family.sizes.hidden(config))
    packed: dict[int, torch.Tensor] = {}  # by id: a tensor that several blocks share stays one object and is sent once
    by_block: Residuals = {}
    for kind, tensors in (control or {}).items():
        name = family.blocks.residuals.get(kind)
        if name is None and any(tensor is not None for tensor in tensors):
            refuse_control(f"it has '{kind}' outputs, which {family.name} takes none of on several devices")
        for index, tensor in enumerate(tensors[: counts[name]] if name else ()):
            if tensor is None:
                continue
            if tensor.shape != size:
                refuse_control(f"an output is {list(tensor.shape)}, where the model's blocks have {list(size)}")
            if id(tensor) not in packed:
                packed[id(tensor)] = tensor if order is None else tensor[:, order]
            by_block[f"{name}.{index}"] = packed[id(tensor)]
    return by_block


def refuse_control(why: str) -> NoReturn:
    """Raise the ValueError for a ControlNet's outputs."""
    raise ValueError(
        f"control_net: this ControlNet does not fit the model: {why}. Use a ControlNet made for the model, or load the "
        "model with a native loader."
    )
