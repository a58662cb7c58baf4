"""Tokens and positions of reference pictures (Flux Kontext, Qwen-Image-Edit and others) from ComfyUI's `ref_latents`."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..base.family import Family
from ..base.patching import Patching
from ..base.step_inputs import REFERENCE_POSITIONS, REFERENCES
from .rope import NO_SHIFT, Shift, scale_and_shift

ACCEPTS = ("ref_latents", "ref_latents_method")
"""`Inputs.accepts`: arguments of ComfyUI's model call that `reference_tensors` reads."""
METHODS = ("index", "offset", "negative_index")
UXO = "uxo"
"""Method of UNO's and USO's models (arXiv 2504.02160): pictures lie along the diagonal, behind the latent's lower right."""


def reference_tokens(family: Family, call: Mapping[str, Any]) -> int:
    """Number of reference tokens of a model call, from the latents that `Inputs.references` names."""
    latents, patching = family.inputs.references(call), family.patching
    videos = (latent.unsqueeze(2) if patching.video and latent.ndim == 4 else latent for latent in latents)
    return sum(math.prod(patching.grid(tuple(latent.shape))) for latent in videos)


def reference_tensors(
    patching: Patching,
    call: dict[str, Any],
    method: str,
    step: float = 1.0,
    methods: tuple[str, ...] = METHODS,
    usual: Shift = NO_SHIFT,
) -> dict[str, torch.Tensor]:
    """Conditioning tensors of a call's reference pictures, concatenated. Empty if it has none. ValueError for other methods.

    Positions are (index, row, column), as in ComfyUI's native models (comfy/ldm/flux/model.py). With 'index' and
    'negative_index' picture i has the index i * `step` or its negative. With 'offset' all have index 1 and lie side by side.
    With 'uxo', which needs the latent's `grid` in the call, all have index 0.
    `method`: used where the call names none. `methods`: those that the
    family has. `usual`: added to every position, unless the call's rope options name another shift. Their scale multiplies
    rows and columns.
    """
    pictures = call.get("ref_latents")
    if not pictures:
        return {}
    method = call.get("ref_latents_method") or method
    if method not in methods:
        raise ValueError(
            f"positive, negative: the reference latents' method is '{method}', which cannot be run on several devices. Use "
            f"{' or '.join(methods)} in the node that sets it."
        )
    scale, shift = scale_and_shift(call, usual)
    tokens, positions, height, width = [], [], 0, 0
    for number, picture in enumerate(pictures, 1):
        picture = picture.unsqueeze(2) if patching.video and picture.ndim == 4 else picture
        rows, columns = patching.grid(tuple(picture.shape))[-2:]
        index, down, right = number * step, 0, 0
        if method == "negative_index":
            index = -index
        elif method == "offset":
            index = 1
            # As in ComfyUI: to the right of the pictures before it, where below them it would reach further.
            if picture.shape[-2] + height > picture.shape[-1] + width:
                right = width
            else:
                down = height
            height, width = max(height, picture.shape[-2] + down), max(width, picture.shape[-1] + right)
        elif method == UXO:
            index, (latent_rows, latent_columns) = 0, call["grid"][-2:]
            down, right = latent_rows * patching.side + height, latent_columns * patching.side + width
            height, width = height + picture.shape[-2], width + picture.shape[-1]
        top, left = ((side + patching.side // 2) // patching.side for side in (down, right))
        sides = (torch.arange(float(rows)) * scale[1] + top, torch.arange(float(columns)) * scale[2] + left)
        positions.append(torch.cartesian_prod(torch.tensor([float(index)]), *sides))
        tokens.append(patching.pack(picture))
    packed = torch.cat(tokens, dim=1)
    places = (torch.cat(positions) + torch.tensor(shift)).expand(len(packed), -1, -1).to(packed.device)
    return {REFERENCES: packed, REFERENCE_POSITIONS: places}
