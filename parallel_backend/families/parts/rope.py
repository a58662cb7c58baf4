"""Positions that other nodes scale and shift: ComfyUI's `rope_options` (ScaleROPE) and the frequency that RIFLEx replaces.

Sources: comfy/ldm/wan/model.py (rope_encode); RIFLEx, arXiv 2502.15894.
"""

from typing import Any

import torch

from ..base.step_inputs import ROPE, ROPE_FREQUENCY

OPTION = "rope_options"
"""Entry of ComfyUI's transformer_options: scale_t, scale_y, scale_x, shift_t, shift_y and shift_x, where they are set."""

FREQUENCY = "parallel_dit_rope_frequency"
"""Entry of transformer_options: (number, radians) of a frequency of the frames' axis, which RIFLEx replaces."""

AXES = ("t", "y", "x")


def rope_tensors(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """ROPE and ROPE_FREQUENCY of a model call, if it has them."""
    options = call.get(OPTION) or {}
    scale = [float(options.get(f"scale_{axis}", 1.0)) for axis in AXES]
    shift = [float(options.get(f"shift_{axis}", 0.0)) for axis in AXES]
    tensors = {}
    if (scale, shift) != ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]):
        tensors[ROPE] = torch.tensor((scale, shift)).expand(len(call["context"]), -1, -1)
    if call.get(FREQUENCY) is not None:
        tensors[ROPE_FREQUENCY] = torch.tensor(call[FREQUENCY]).expand(len(call["context"]), -1)
    return tensors


def rope_axes(head: int) -> tuple[int, int, int]:
    """Channels of a head for each axis of the rotary embedding. The weights do not show them.

    Qwen-Image has (16, 56, 56) in heads of 128. Other heads (test models) get these proportions, all even.
    """
    spatial = head * 7 // 16 // 2 * 2
    return head - 2 * spatial, spatial, spatial
