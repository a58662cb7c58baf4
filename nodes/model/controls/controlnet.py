"""Outputs of ComfyUI's ControlNets."""

from typing import NoReturn

import torch

Control = dict[str, list[torch.Tensor | None]]
"""The result of ComfyUI's `get_control`: "input", "middle" or "output" -> for each block [B, tokens, hidden] or None. Tokens
are in the order of ComfyUI's model: (frames,) rows, columns."""


def refuse_control(why: str) -> NoReturn:
    """Raise the ValueError for a ControlNet's outputs."""
    raise ValueError(
        f"control_net: this ControlNet does not fit the model: {why}. Use a ControlNet made for the model, or load the "
        "model with ComfyUI's own loader."
    )
