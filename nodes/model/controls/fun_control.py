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
import comfy.model_patcher
import comfy.ops
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import values_of
from parallel_backend.own_class.calls.residuals import PATCHED

from ...ui.other_nodes import is_known
from ..native.native_call import NativeClass
from .controlnet import Control
from .layers_here import LayersHere

FUN_CONTROL = re.compile(r"nodes_model_patch\.ZImageControlPatch")
"""Class of the node's patch."""
REFINERS, BLOCKS = PATCHED
"""Kinds of patch that the node puts on a MODEL, and also kinds of residuals."""
TAKES = "ZImage"
"""Class of ComfyUI's supported_models that calls such patches."""
EMBEDDING = ("x_embedder.", "t_embedder.", "cap_embedder.", "x_pad_token", "cap_pad_token")


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


class FunControl:
    """Computes the residuals of Fun controls, with the checkpoint's layers before the blocks."""

    def __init__(self, checkpoint: Checkpoint, native: NativeClass, unet_config: Mapping[str, Any], dtype: torch.dtype):
        """`native`: ComfyUI's class. `unet_config`: its arguments. `dtype`: compute dtype of the ranks."""
        self._checkpoint, self._native, self._unet_config, self._dtype = checkpoint, native, unet_config, dtype
        self.layers = LayersHere(self._make, "ZImageFunControlnet")

    def additions(
        self,
        model: comfy.model_patcher.ModelPatcher,
        controls: Mapping[str, list[Any]],
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor,
        options: Mapping[str, Any],
    ) -> Control:
        """Return the residuals of `controls` in a model call: kind -> for each block [B, image tokens, hidden] or None.

        `model`: from `layers`. x [B, C, H, W], timestep [B], context [B, T, C] and `options` (transformer_options) are the
        arguments of the native model's call.
        """
        layers = model.model.diffusion_model
        for control in (control for each in controls.values() for control in each):
            control.to(x.device)  # this also drops the state of a call that was interrupted
        x = comfy.ldm.common_dit.pad_to_patch_size(x.to(self._dtype), (layers.patch_size, layers.patch_size))
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
            """Return the patch after a noise refiner, whose output the next refiner needs."""
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
        zeros = torch.zeros_like(picture)
        for index in range(self._unet_config["n_layers"]):
            add(BLOCKS, arguments | {"img": zeros, "block_index": index})
            if residuals[BLOCKS][-1] is not None:  # the controls have written into the zeros
                zeros = torch.zeros_like(picture)
        return residuals

    def _make(self) -> torch.nn.Module:
        """ComfyUI's class without blocks and without the text's refiners, whose outputs no control reads."""
        settings = {**self._unet_config, "n_layers": 0, "dtype": self._dtype, "device": "meta"}
        layers = self._native(**settings, operations=comfy.ops.manual_cast)
        layers.context_refiner, layers.final_layer = torch.nn.ModuleList(), torch.nn.Identity()
        ahead = *EMBEDDING, *(f"{REFINERS}.{index}." for index in range(len(layers.noise_refiner)))
        values = values_of(self._checkpoint, [key for key in self._checkpoint.entries if key.startswith(ahead)])
        layers.load_state_dict({key: value.to(self._dtype) for key, value in values.items()}, assign=True)
        return layers
