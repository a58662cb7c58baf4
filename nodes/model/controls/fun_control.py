"""Z-Image's Fun control (ZImageFunControlnet), run in ComfyUI's process. Ranks get its output as residuals.

The node puts a network on the MODEL, as a patch that the native model calls after each noise refiner and each block. The
network reads the image's tokens before the refiners and before the blocks, the timestep and the positions, but no block's
output. So all residuals of a call can be computed before the ranks begin. The few layers before the blocks run here too, and
the patch is called with zeros, to which it adds the residual.
"""

import re
from collections.abc import Mapping
from typing import Any

import comfy.ldm.common_dit
import torch

from parallel_backend.own_class.calls.residuals import PATCHED

from ...ui.other_nodes import is_known
from .controlnet import Control

FUN_CONTROL = re.compile(r"nodes_model_patch\.ZImageControlPatch")
"""Class of the node's patch."""
REFINERS, BLOCKS = PATCHED
"""Kinds of patch that the node puts on a MODEL, and also kinds of residuals."""
TAKES = "ZImage"
"""Class of ComfyUI's supported_models that calls such patches."""


def fun_controls(kind: str, options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return kind of patch -> the Fun controls in a call's transformer_options. `kind`: the model's, see OwnClass."""
    of_kind = {
        name: [each for each in functions if is_known(FUN_CONTROL, type(each))]
        for name, functions in options.get("patches", {}).items()
        if name in PATCHED and kind == TAKES
    }
    return {name: controls for name, controls in of_kind.items() if controls}


def without_fun_controls(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transformer_options without Fun controls."""
    controls = fun_controls(kind, options)
    patches = {
        name: [each for each in functions if each not in controls.get(name, ())]
        for name, functions in options.get("patches", {}).items()
    }
    return {**options, "patches": patches} if controls else dict(options)


def additions(
    layers: Any,
    controls: Mapping[str, list[Any]],
    x: torch.Tensor,
    timestep: torch.Tensor,
    context: torch.Tensor,
    options: Mapping[str, Any],
) -> Control:
    """Return the residuals of `controls` in a model call: kind -> for each block [B, image tokens, hidden] or None.

    `layers`: the native model without its blocks. x [B, C, H, W] in the compute dtype, timestep [B], context [B, T, C] and
    `options` (transformer_options) are the arguments of the native model's call.
    """
    for control in (control for each in controls.values() for control in each):
        control.to(x.device)  # this also drops the state of a call that was interrupted
    x = comfy.ldm.common_dit.pad_to_patch_size(x, (layers.patch_size, layers.patch_size))
    tokens = x.shape[-2] * x.shape[-1] // layers.patch_size**2
    time = layers.t_embedder((1.0 - timestep.to(x.device)) * layers.time_scale, dtype=x.dtype)
    residuals: Control = {REFINERS: [], BLOCKS: []}

    def add(kind: str, arguments: dict[str, Any]) -> torch.Tensor:
        """Call the controls that follow one block. They add to `arguments["img"]`, which is zeros [B, T, C]."""
        residual = arguments["img"]
        for control in controls.get(kind, ()):
            control(dict(arguments))
        residuals[kind].append(residual[:, :tokens] if residual.any() else None)
        return residual

    def refined(arguments: dict[str, Any]) -> dict[str, Any]:
        """The patch that follows a noise refiner, whose output the next refiner needs."""
        zeros = torch.zeros_like(arguments["img"])
        return {"img": arguments["img"] + add(REFINERS, arguments | {"img": zeros})}

    inside = {**options, "patches": {REFINERS: [refined]}, "patches_replace": {}}
    context = context.to(x.device, x.dtype)
    embedded, _, _, (text_tokens, *_), positions, _ = layers.patchify_and_embed(
        x, context, None, time, None, transformer_options=inside
    )
    picture, text = embedded[:, text_tokens:], embedded[:, :text_tokens]
    arguments = {"img_input": picture, "txt": text, "pe": positions[:, text_tokens:].to(x.device)}
    arguments |= {"vec": time, "x": x, "transformer_options": inside}
    for index in range(len(layers.layers)):
        add(BLOCKS, arguments | {"img": torch.zeros_like(picture), "block_index": index})
    return residuals
