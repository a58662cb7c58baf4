"""Controls whose networks run in ComfyUI's process, for a MODEL whose blocks are on ranks."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import comfy.model_patcher
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import Residuals

from ..native.native_call import NativeArguments, NativeClass
from ..run.sampling_run import SamplingRun
from .controlnet import Control
from .fun_control import FunControl, fun_controls
from .layers_here import LayersHere, Patches
from .sequence_control import SequenceControl, sequence_controls


class ControlsHere:
    """`native()`: ComfyUI's class. `unet_config`: its arguments. `dtype`: compute dtype of the ranks."""

    def __init__(
        self, checkpoint: Checkpoint, native: Callable[[], NativeClass], unet_config: Mapping[str, Any], dtype: torch.dtype
    ):
        self._checkpoint, self._native, self._unet_config, self._dtype = checkpoint, native, unet_config, dtype

    def models(
        self, options: Mapping[str, Any], patches: list[Patches], hooked: Collection[Patches], name: Any
    ) -> list[comfy.model_patcher.ModelPatcher]:
        """Layers of the native model that the controls in `options` need, for ComfyUI to load. See LayersHere.model."""
        return [layers.model(patches, hooked, name) for layers in self._needed(options)]

    def of_all_tokens(self, call: NativeArguments, run: SamplingRun, is_carried: bool) -> Residuals:
        """Return the residuals that controls for all tokens add around blocks. `is_carried`: see answered_call.answered."""
        if not (controls := sequence_controls(call.options)):
            return {}
        layers = self._layers(call.options, run)
        return self._sequence_control.residuals(layers, controls, call, is_carried)

    def with_fun(
        self,
        control: Control | None,
        latent: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None,
        options: Mapping[str, Any],
        run: SamplingRun,
    ) -> Control | None:
        """The outputs of ControlNets together with those of an image's Fun controls, which are in transformer_options."""
        if not (controls := fun_controls(self._checkpoint.built.own.kind, options)):
            return control
        assert context is not None, "calls of these models need a text"
        layers = self._layers(options, run)
        added = self._fun_control.additions(layers, controls, latent, timestep, context, dict(options))
        return (control or {}) | added

    def _layers(self, options: Mapping[str, Any], run: SamplingRun) -> comfy.model_patcher.ModelPatcher:
        patches: list[Patches] = [run.patches, run.bypass_patches]
        return self.models(options, patches, run.hook_patches.values(), run.patches_uuid)[0]

    def _needed(self, options: Mapping[str, Any]) -> list[LayersHere]:
        """Return the layers for the controls in `options`. A model has at most one of the two kinds."""
        if fun_controls(self._checkpoint.built.own.kind, options):
            return [self._fun_control.layers]
        return [self._sequence_control.layers] if sequence_controls(options) else []

    @functools.cached_property
    def _fun_control(self) -> FunControl:
        return FunControl(self._checkpoint, self._native(), self._unet_config, self._dtype)

    @functools.cached_property
    def _sequence_control(self) -> SequenceControl:
        return SequenceControl(self._checkpoint, self._native(), self._unet_config, self._dtype)
