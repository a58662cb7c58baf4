"""Outputs of ComfyUI's ControlNets."""

from typing import NoReturn

import torch

Control = dict[str, list[torch.Tensor | None]]
"""The result of ComfyUI's `get_control`: "input", "middle" or "output" -> for each block [B, tokens, hidden] or None.

Tokens are in ComfyUI's model's order: (frames,) rows, columns."""


def refuse_outputs(control: Control | None, model: str) -> None:
    """ValueError if there are any, for a family, which takes none. `model`: its name."""
    for kind, tensors in (control or {}).items():
        if any(tensor is not None for tensor in tensors):
            refuse_control(f"it has '{kind}' outputs, which {model} cannot use on several devices")


def refuse_control(why: str) -> NoReturn:
    """Raise the ValueError for a ControlNet's outputs."""
    raise ValueError(
        f"control_net: this ControlNet does not fit the model: {why}. Use a ControlNet made for the model, or load the "
        "model with ComfyUI's own loader."
    )
