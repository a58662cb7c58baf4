"""Positions that other nodes scale and shift: ComfyUI's `rope_options` (ScaleROPE) and the frequency that RIFLEx replaces.

Sources: comfy/ldm/flux/model.py (process_img), comfy/ldm/wan/model.py (rope_encode); RIFLEx, arXiv 2502.15894.
"""

from typing import Any

import torch

from ..base.step_inputs import ROPE, ROPE_FREQUENCY

OPTION = "rope_options"
"""Entry of ComfyUI's transformer_options: scale_t, scale_y, scale_x, shift_t, shift_y and shift_x, where they are set."""

FREQUENCY = "parallel_dit_rope_frequency"
"""Entry of transformer_options: (number, radians) of a frequency of the frames' axis, which RIFLEx replaces."""

AXES = ("t", "y", "x")

Shift = tuple[float, float, float]
NO_SHIFT: Shift = (0.0, 0.0, 0.0)


def scale_and_shift(call: dict[str, Any], usual: Shift = NO_SHIFT) -> tuple[Shift, Shift]:
    """Factor of positions (index or frame, row, column), and the shift that is then added to them.

    `usual`: the shift of calls whose options name none.
    """
    options = call.get(OPTION) or {}
    scale_t, scale_y, scale_x = (float(options.get(f"scale_{axis}", 1.0)) for axis in AXES)
    shift_t, shift_y, shift_x = (float(options.get(f"shift_{axis}", shift)) for axis, shift in zip(AXES, usual, strict=True))
    return (scale_t, scale_y, scale_x), (shift_t, shift_y, shift_x)


def rope_tensors(call: dict[str, Any], usual: Shift = NO_SHIFT) -> dict[str, torch.Tensor]:
    """ROPE and ROPE_FREQUENCY of a model call, if it has them. `usual`: the shift that the ranks add in any case."""
    scale, shift = scale_and_shift(call, usual)
    tensors = {}
    if (scale, shift) != ((1.0, 1.0, 1.0), usual):
        added = [total - part for total, part in zip(shift, usual, strict=True)]
        tensors[ROPE] = torch.tensor((scale, added)).expand(len(call["context"]), -1, -1)
    if call.get(FREQUENCY) is not None:
        tensors[ROPE_FREQUENCY] = torch.tensor(call[FREQUENCY]).expand(len(call["context"]), -1)
    return tensors


def rope_axes(head: int) -> tuple[int, int, int]:
    """Channels of a head for each axis of the rotary embedding. The weights do not show them.

    Qwen-Image has (16, 56, 56) in heads of 128. Other heads (test models) get these proportions, all even.
    """
    spatial = head * 7 // 16 // 2 * 2
    return head - 2 * spatial, spatial, spatial
