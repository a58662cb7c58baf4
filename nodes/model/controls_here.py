"""Controls whose networks run in ComfyUI's process, for a MODEL whose blocks are on ranks."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_patcher
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.client.call import Residuals
from parallel_backend.families.base.patching import Latents

from .controlnet import Control, residuals
from .fun_control import FunControl, fun_controls
from .layers_here import LayersHere, Patches
from .native_call import NativeClass
from .sampling_run import SamplingRun
from .sequence_control import SequenceControl, sequence_controls


@dataclass(frozen=True)
class NativeArguments:
    """A call of the native model, as its class gets it inside of wrappers."""

    latents: Latents
    timestep: Any
    others: Mapping[str, Any]
    """By name, `context` among them."""
    options: Mapping[str, Any]
    """Its transformer_options."""


class ControlsHere:
    """`native` gives ComfyUI's class, `unet_config` has its arguments. `dtype`: in which ranks compute."""

    def __init__(
        self, checkpoint: Checkpoint, native: Callable[[], NativeClass], unet_config: Mapping[str, Any], dtype: torch.dtype
    ):
        self._checkpoint, self._native, self._unet_config, self._dtype = checkpoint, native, unet_config, dtype

    def models(
        self, options: Mapping[str, Any], patches: list[Patches], hooked: Collection[Patches], name: Any
    ) -> list[comfy.model_patcher.ModelPatcher]:
        """Layers of the native model that the controls in `options` need, for ComfyUI to load. See LayersHere.model."""
        return [layers.model(patches, hooked, name) for layers in self._needed(options)]

    def residuals(
        self,
        call: NativeArguments,
        control: Control | None,
        tensors: Mapping[str, torch.Tensor],
        along: str,
        run: SamplingRun,
    ) -> Residuals:
        """What all controls of a call add behind blocks: of ControlNets, whose outputs are `control`, and of those here.

        `tensors`: the call's conditioning tensors. `along`: see `controlnet.residuals`.
        """
        family, config, latents, options = self._checkpoint.family, self._checkpoint.config, call.latents, call.options
        control = self.with_fun(control, latents[0], call.timestep, call.others["context"], options, run)
        of_blocks = residuals(family, config, control, tuple(latents[0].shape), along)
        if of_sequence := sequence_controls(family, options):
            assert not of_blocks, "a family with controls of all tokens takes no ControlNet, which is refused above"
            return self._sequence_control.residuals(
                self._layers(options, run), of_sequence, latents, call.timestep, call.others, options, tensors
            )
        return of_blocks

    def with_fun(
        self,
        control: Control | None,
        latent: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None,
        options: Mapping[str, Any],
        run: SamplingRun,
    ) -> Control | None:
        """The outputs of ControlNets, with what a picture's Fun controls in transformer_options add to a native call."""
        if not (controls := fun_controls(self._checkpoint.family, options)):
            return control
        assert context is not None, "calls of these models have a text"
        layers = self._layers(options, run)
        added = self._fun_control.additions(layers, controls, latent, timestep, context, dict(options))
        return (control or {}) | added

    def _layers(self, options: Mapping[str, Any], run: SamplingRun) -> comfy.model_patcher.ModelPatcher:
        patches: list[Patches] = [run.patches, run.bypass_patches]
        return self.models(options, patches, run.hook_patches.values(), run.patches_uuid)[0]

    def _needed(self, options: Mapping[str, Any]) -> list[LayersHere]:
        """A family has at most one of the two kinds."""
        if fun_controls(self._checkpoint.family, options):
            return [self._fun_control.layers]
        return [self._sequence_control.layers] if sequence_controls(self._checkpoint.family, options) else []

    @functools.cached_property
    def _fun_control(self) -> FunControl:
        return FunControl(self._checkpoint, self._native(), self._unet_config, self._dtype)

    @functools.cached_property
    def _sequence_control(self) -> SequenceControl:
        return SequenceControl(self._checkpoint, self._native(), self._unet_config, self._dtype)
