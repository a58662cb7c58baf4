"""A part of the native model that runs in ComfyUI's process. Ranks have the whole model."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ...ui.host import refuse
from ..lora.lora import PREFIX
from ..lora.patch_trial import Patch

Patches = Mapping[str, list[Patch]]
"""A ModelPatcher's patches, by the native model's keys."""


class LayersHere:
    """Layers of the native model, read at the first use. ComfyUI moves and unloads them like any other model. `make` returns
    ComfyUI's class with weights only for these layers. `node`: title of the node that needs them."""

    def __init__(self, make: Callable[[], torch.nn.Module], node: str):
        self._make, self._node = make, node
        self._patched: dict[Any, comfy.model_patcher.ModelPatcher] = {}  # the last patches' name -> layers with them

    def model(self, patches: list[Patches], hooked: Collection[Patches], name: Any) -> comfy.model_patcher.ModelPatcher:
        """Return the layers as a model for ComfyUI to load, with those `patches` that are for them. `name` stands for
        `patches`. Raises ValueError if `hooked`, the patches of a conditioning's LoRAs, has some for these layers."""
        layer_patches: dict[str, list[Patch]] = {}
        for key in self._layers.model.state_dict():
            if key_patches := [patch for table in patches for patch in table.get(key, ())]:
                layer_patches[key] = key_patches
            if any(key in table for table in hooked):
                refuse(
                    f"a conditioning's LoRA for {key.removeprefix(PREFIX)} beside {self._node}",
                    "Load that LoRA for the whole model.",
                )
        if not layer_patches:
            return self._layers
        if name not in self._patched:
            patcher = self._layers.clone()
            patcher.patches, patcher.patches_uuid = layer_patches, name
            self._patched = {name: patcher}
        return self._patched[name]

    @functools.cached_property
    def _layers(self) -> comfy.model_patcher.ModelPatcher:
        whole = torch.nn.Module()
        whole.add_module(PREFIX.removesuffix("."), self._make().eval().requires_grad_(False))
        return comfy.model_patcher.ModelPatcher(
            whole,
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
