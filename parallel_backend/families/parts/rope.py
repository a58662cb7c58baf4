"""Positions as other nodes scale and shift them: ComfyUI's `rope_options` (ScaleROPE), and RIFLEx's one other frequency.

Sources: comfy/ldm/flux/model.py (process_img), comfy/ldm/wan/model.py (rope_encode); RIFLEx, arXiv 2502.15894.
"""

from typing import Any

import torch

from parallel_backend.families.base.step_inputs import ROPE, ROPE_FREQUENCY

OPTION = "rope_options"
"""Entry of ComfyUI's transformer_options: scale_t, scale_y, scale_x, shift_t, shift_y and shift_x, where they are set."""

FREQUENCY = "parallel_dit_rope_frequency"
"""Entry of transformer_options: (number, radians) of a frequency of the frames' axis, which RIFLEx replaces."""

AXES = ("t", "y", "x")

Shift = tuple[float, float, float]


def scale_and_shift(given: dict[str, Any], usual: Shift = (0.0, 0.0, 0.0)) -> tuple[Shift, Shift]:
    """What positions (index or frame, row, column) are multiplied by, and what is then added.

    `usual`: what ComfyUI has added by itself, and the family adds too: the rest is given out.
    """
    options = given.get(OPTION) or {}
    scale = tuple(float(options.get(f"scale_{axis}", 1.0)) for axis in AXES)
    shifts = (float(options.get(f"shift_{axis}", own)) - own for axis, own in zip(AXES, usual, strict=True))
    return scale, tuple(shifts)


def rope_tensors(given: dict[str, Any], usual: Shift = (0.0, 0.0, 0.0)) -> dict[str, torch.Tensor]:
    """ROPE and ROPE_FREQUENCY of a model call, if it has them. `usual`: see `scale_and_shift`."""
    scale, shift = scale_and_shift(given, usual)
    tensors = {}
    if (scale, shift) != ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)):
        tensors[ROPE] = torch.tensor((scale, shift)).expand(len(given["context"]), -1, -1)
    if given.get(FREQUENCY) is not None:
        tensors[ROPE_FREQUENCY] = torch.tensor(given[FREQUENCY]).expand(len(given["context"]), -1)
    return tensors
