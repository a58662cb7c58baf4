"""Wan with camera control, 2.1 and 2.2: the camera moves along a path."""

from dataclasses import replace
from typing import Any

import torch

from .base.family import cached
from .base.file_layout import Source
from .base.step_inputs import Config, Shapes, StepInputs
from .parts import wan
from .wan import WAN


def _configure(shapes: Shapes) -> Config:
    return wan.configure(shapes) | {"control_channels": shapes["control_adapter.conv.weight"][1] // wan.PIXELS**2}


def _key_map(config: Config) -> dict[str, Source]:
    keys = wan.key_map(config, "patch_embedding.video")
    camera = keys.inside("patch_embedding.camera.", "control_adapter.")
    camera.same("conv")
    camera.copy({name: f"residual_blocks.0.{name}" for name in ("conv1", "conv2")})
    return keys.sources


def _conditioning(config: Config, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As Wan's and, if the call has a path, its rays `camera` [B, control_channels, T, 8 H, 8 W]."""
    tensors, camera = wan.conditioning(config, call), call.get("camera_conditions")
    return tensors if camera is None else tensors | {"camera": camera}


def _check_grid(grid: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
    if "camera" in tensors:
        frames, *sides = tensors["camera"].shape[2:]
        wan.check_sizes("the camera's path", grid, (frames, *(side / wan.PIXELS for side in sides)))


def _arguments(step: StepInputs, config: Config) -> dict[str, Any]:
    return wan.arguments(step, config) | {"patch_inputs": {"camera": step.tensors.get("camera")}}  # of the first stage


WAN_CAMERA = replace(
    WAN,
    name="wan-camera",
    model_class="WanCamera",
    class_module="parallel_backend.families.models.wan_camera",
    native_classes=("WAN21_Camera", "WAN22_Camera"),
    file=replace(
        WAN.file,
        detect=lambda shapes: wan.kind(shapes) == "camera",
        configure=_configure,
        key_map=_key_map,
        header=wan.header(
            model_type=lambda config: ("camera_2.2",) if config["image_dim"] is None else ("camera",),
            in_dim_control_adapter=lambda config: (config["control_channels"],),
        ),
    ),
    inputs=replace(
        WAN.inputs,
        conditioning=_conditioning,
        check_grid=_check_grid,
        accepts=(*wan.ACCEPTS, "camera_conditions"),
        options=wan.OPTIONS,
    ),
    forward=replace(
        WAN.forward,
        arguments=_arguments,
        cached_modules={**WAN.forward.cached_modules, **cached(prompt=("patch_embedding.camera",))},
    ),
)
