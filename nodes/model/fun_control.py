"""Z-Image's Fun control (ZImageFunControlnet), run in ComfyUI's process. What it adds goes to the ranks as residuals.

The node has a network beside the model's blocks: a patch that the native model calls behind each noise refiner and each
block. The network looks at the picture's tokens before the refiners and before the blocks, at the time and at positions,
and never at what a block gives out. So all that it adds in a call is known before the ranks begin. ComfyUI's own layers up
to the blocks, which are few, are run here beside the ranks', and the patch is called with zeros to add to.
"""

from collections.abc import Collection, Mapping
from typing import Any

import comfy.ldm.common_dit
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import original_values
from parallel_backend.families import Family

from ..ui.host import refuse
from .block_patches import FUN_CONTROL, is_known
from .controlnet import Control
from .lora import PREFIX, Patch

REFINERS, BLOCKS = "noise_refiner", "double_block"
"""Kinds of patch that the node puts on a MODEL. They are kinds of residuals too (Blocks.residuals)."""
EMBEDDING = ("x_embedder.", "t_embedder.", "cap_embedder.", "x_pad_token", "cap_pad_token")

Patches = Mapping[str, list[Patch]]


def fun_controls(family: Family, options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Kind of patch -> the Fun controls among those of a call's transformer_options. Empty: none for this family."""
    found = {
        kind: [each for each in functions if is_known(FUN_CONTROL, type(each))]
        for kind, functions in options.get("patches", {}).items()
        if kind in family.blocks.residuals
    }
    return {kind: controls for kind, controls in found.items() if controls}


class FunControl:
    """Works out what Fun controls add, with the checkpoint's own layers up to its blocks.

    Those are read at the first use and are a model of ComfyUI's own, which it moves and unloads as any.
    """

    def __init__(self, checkpoint: Checkpoint, native: type, unet_config: Mapping[str, Any], dtype: torch.dtype):
        """`native`: ComfyUI's class, `unet_config` its arguments. `dtype`: what the ranks compute in."""
        self._checkpoint, self._native, self._unet_config, self._dtype = checkpoint, native, unet_config, dtype
        self._made: tuple[Any, comfy.model_patcher.ModelPatcher] | None = None

    def model(self, patches: list[Patches], hooked: Collection[Patches], name: Any) -> comfy.model_patcher.ModelPatcher:
        """The layers, for ComfyUI to load, with those of the patches that are for them. `name` stands for all `patches`.

        ValueError if `hooked`, a conditioning's LoRAs, have some for them.
        """
        if self._made is None:
            self._made = None, self._read()
        known, patcher = self._made
        own: dict[str, list[Patch]] = {}
        for key in patcher.model.state_dict():
            if added := [patch for table in patches for patch in table.get(key, ())]:
                own[key] = added
            if any(key in table for table in hooked):
                refuse(
                    f"a conditioning's LoRA for {key.removeprefix(PREFIX)} beside ZImageFunControlnet",
                    "Load that LoRA for the whole model.",
                )
        if known != (name := name if own else None):
            patcher = patcher.clone()
            patcher.patches, patcher.patches_uuid = own, name
            self._made = name, patcher
        return patcher

    def additions(
        self,
        model: comfy.model_patcher.ModelPatcher,
        controls: Mapping[str, list[Any]],
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor,
        options: Mapping[str, Any],
    ) -> Control:
        """What `controls` add in a model call: kind -> by block [B, tokens, hidden] of the picture's tokens, or None.

        `model`: what `self.model` gave. x [B, C, H, W], timestep [B], context [B, T, C] and `options` (transformer_options):
        the native model call's.
        """
        layers = model.model.diffusion_model
        for control in (control for each in controls.values() for control in each):
            control.to(x.device)  # it also forgets what an unfinished call has left
        x = comfy.ldm.common_dit.pad_to_patch_size(x.to(self._dtype), (layers.patch_size, layers.patch_size))
        tokens = x.shape[-2] * x.shape[-1] // layers.patch_size**2
        time = layers.t_embedder((1.0 - timestep.to(x.device)) * layers.time_scale, dtype=x.dtype)
        found: dict[str, list[torch.Tensor | None]] = {REFINERS: [], BLOCKS: []}

        def add(kind: str, given: dict[str, Any]) -> torch.Tensor | None:
            """Call the controls behind one block. `given`: the native model's arguments for them."""
            zeros = given["img"]
            for control in controls.get(kind, ()):
                control(dict(given))
            found[kind].append(zeros[:, :tokens] if zeros.any() else None)
            return zeros

        def refined(given: dict[str, Any]) -> dict[str, Any]:
            return {"img": given["img"] + add(REFINERS, given | {"img": torch.zeros_like(given["img"])})}

        inside = {**options, "patches": {REFINERS: [refined]}, "patches_replace": {}}
        context = context.to(x.device, x.dtype)
        embedded, _, _, (words, *_), positions, _ = layers.patchify_and_embed(
            x, context, None, time, None, transformer_options=inside
        )
        given = {"img_input": embedded[:, words:], "txt": embedded[:, :words], "pe": positions[:, words:].to(x.device)}
        given |= {"vec": time, "x": x, "transformer_options": inside}
        zeros = None
        for index in range(self._checkpoint.family.blocks.total(self._checkpoint.config)):
            zeros = torch.zeros_like(given["img_input"]) if zeros is None else zeros
            add(BLOCKS, given | {"img": zeros, "block_index": index})
            if found[BLOCKS][-1] is not None:
                zeros = None
        return found

    def _read(self) -> comfy.model_patcher.ModelPatcher:
        """ComfyUI's own class without its blocks and the text's refiners, whose results no control looks at."""
        settings = {**self._unet_config, "n_layers": 0, "dtype": self._dtype, "device": "meta"}
        layers = self._native(**settings, operations=comfy.ops.manual_cast)
        layers.context_refiner, layers.final_layer = torch.nn.ModuleList(), torch.nn.Identity()
        values = {}
        for prefix in (*EMBEDDING, *(f"{REFINERS}.{index}." for index in range(len(layers.noise_refiner)))):
            for key, value in original_values(self._checkpoint, prefix).items():
                values[prefix + key] = value.to(self._dtype)
        layers.load_state_dict(values, assign=True)
        whole = torch.nn.Module()
        whole.add_module(PREFIX.removesuffix("."), layers.eval().requires_grad_(False))
        return comfy.model_patcher.ModelPatcher(
            whole,
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
