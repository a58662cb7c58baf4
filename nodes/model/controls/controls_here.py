"""Controls whose networks run in ComfyUI's process, and the native model's layers that they need there.

The layers are those around the blocks. ComfyUI moves and unloads them as any other model.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import values_of
from parallel_backend.client.call import Residuals
from parallel_backend.own_class.built.building import arguments_of, class_of

from ...ui.host import refuse
from ..lora.lora import PREFIX, NativeWeights
from ..lora.patch_trial import Patch
from ..native.native_call import NativeArguments
from ..run.sampling_run import SamplingRun
from .controlnet import Control
from .fun_control import TAKES, additions, fun_controls
from .sequence_control import blocks_of, residuals_of, sequence_controls

Patches = Mapping[str, list[Patch]]
"""A ModelPatcher's patches, by the native model's keys."""


class ControlsHere:
    """The controls of a MODEL whose blocks are on ranks. `weights`: names and dtype of the checkpoint's weights."""

    def __init__(self, checkpoint: Checkpoint, weights: NativeWeights):
        self._checkpoint, self._weights, self._own = checkpoint, weights, checkpoint.built.own
        self._patched: dict[Any, comfy.model_patcher.ModelPatcher] = {}  # the last patches' name -> layers with them

    def models(
        self, options: Mapping[str, Any], patches: list[Patches], hooked: Collection[Patches], name: Any
    ) -> list[comfy.model_patcher.ModelPatcher]:
        """Return the layers with their `patches`, as a model for ComfyUI to load. Empty if there is no control in `options`.
        `name` stands for `patches`.

        Raises ValueError if `hooked`, the patches of a conditioning's LoRAs, have some for these layers.
        """
        if not fun_controls(self._own.kind, options) and not sequence_controls(options):
            return []
        layer_patches: dict[str, list[Patch]] = {}
        for key in self._layers.model.state_dict():
            if key_patches := [patch for table in patches for patch in table.get(key, ())]:
                layer_patches[key] = key_patches
            if any(key in table for table in hooked):
                layer = key.removeprefix(PREFIX)
                refuse(f"a conditioning's LoRA for {layer} beside a Fun control", "Load that LoRA for the whole model.")
        if not layer_patches:
            return [self._layers]
        if name not in self._patched:
            patcher = self._layers.clone()
            patcher.patches, patcher.patches_uuid = layer_patches, name
            self._patched = {name: patcher}
        return [self._patched[name]]

    def of_all_tokens(self, call: NativeArguments, run: SamplingRun, is_carried: bool) -> Residuals:
        """Return the residuals that controls for all tokens add around blocks. `is_carried`: see answered_call.answered."""
        if not (controls := sequence_controls(call.options)):
            return {}
        return residuals_of(self._loaded(call.options, run), class_of(self._own), controls, call, is_carried)

    def with_fun(
        self,
        control: Control | None,
        latent: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None,
        options: Mapping[str, Any],
        run: SamplingRun,
    ) -> Control | None:
        """Return `control`, the outputs of ControlNets, with the outputs of an image's Fun controls added. Fun controls are
        entries of transformer_options."""
        if not (controls := fun_controls(self._own.kind, options)):
            return control
        assert context is not None, "calls of these models need a text"
        x, layers = latent.to(self._weights.dtype), self._loaded(options, run)
        return (control or {}) | additions(layers, controls, x, timestep, context, options)

    def _loaded(self, options: Mapping[str, Any], run: SamplingRun) -> torch.nn.Module:
        """Return the native model's layers, which ComfyUI has loaded for the run."""
        patches: list[Patches] = [run.patches, run.bypass_patches]
        (patcher,) = self.models(options, patches, run.hook_patches.values(), run.patches_uuid)
        return patcher.model.diffusion_model

    @functools.cached_property
    def _layers(self) -> comfy.model_patcher.ModelPatcher:
        """ComfyUI's class, with blocks that have no weights."""
        arguments = arguments_of(self._own) | {"dtype": self._weights.dtype, "device": "meta"}
        layers = class_of(self._own)(**arguments, operations=comfy.ops.manual_cast)
        blocks = blocks_of(layers)
        for index in range(len(blocks)):
            blocks[index] = torch.nn.Identity()
        if self._own.kind == TAKES:
            layers.context_refiner = torch.nn.ModuleList()  # no control reads the refined text
        state, keys = layers.state_dict(), self._weights.keys
        values = values_of(self._checkpoint, [keys[name] for name in state])
        layers.load_state_dict({name: values[keys[name]].to(tensor.dtype) for name, tensor in state.items()}, assign=True)
        whole = torch.nn.Module()
        whole.add_module(PREFIX.removesuffix("."), layers.eval().requires_grad_(False))
        return comfy.model_patcher.ModelPatcher(
            whole,
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
