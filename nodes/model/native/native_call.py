"""Other nodes' wrappers around the native model's forward (ComfyUI's DIFFUSION_MODEL wrappers), run around the ranks' call.

A wrapper gets the arguments that the native class's `forward` hands to its `_forward`, in that order. So that `forward` is
called with RemoteDiffusionModel as `self`: it runs the wrappers, and inside them RemoteDiffusionModel._forward.
"""

import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_detection
import comfy.patcher_extension
import torch

from parallel_backend.core.short_text import short
from parallel_backend.families.base.patching import Latents
from parallel_backend.families.base.step_inputs import Shapes

NATIVE: Mapping[str, str] = {
    "WAN_Animate2": "wan.model_animate2:WanAnimate2Model",
    "QwenImage21": "qwen_image21.model:QwenImage21Transformer2DModel",
}
"""Class of ComfyUI's supported_models -> the native model's module in comfy.ldm, and its class."""


NativeClass = type[Any]
"""One of those classes, a torch Module with `forward` and mostly `_forward`. ComfyUI declares no common base for them."""


@dataclass(frozen=True)
class NativeArguments:
    """A call of the native model, as its class gets it inside of wrappers."""

    latents: Latents
    timestep: Any
    others: Mapping[str, Any]
    """By name, `context` among them."""
    options: Mapping[str, Any]
    """Its transformer_options."""


def native_class(kind: str) -> NativeClass:
    """The native model's class, for the name of a class of ComfyUI's supported_models."""
    module, _, name = NATIVE[kind].partition(":")
    return getattr(importlib.import_module(f"comfy.ldm.{module}"), name)


def class_arguments(unet_config: Mapping[str, Any]) -> dict[str, Any]:
    """ComfyUI's unet_config without the entries that are no arguments of the native class, or are given apart."""
    return {name: value for name, value in unet_config.items() if name not in ("dtype", "disable_unet_model_creation")}


def runs_wrappers(native: NativeClass) -> bool:
    """Whether the native class's `forward` runs wrappers. PixArt's and others ignore them."""
    return "WrapperExecutor" in native.forward.__code__.co_names


def leaves_wrappers_to_parent(native: NativeClass) -> bool:
    """Whether only the `forward` of a parent class runs wrappers, as for LTX-2.

    The native class calls it by `super()`, which needs an object of the class: it cannot be run around the ranks' call.
    """
    forwards = (vars(base)["forward"] for base in native.__mro__ if "forward" in vars(base))
    others = (forward for forward in forwards if hasattr(forward, "__code__"))
    return not runs_wrappers(native) and any("WrapperExecutor" in forward.__code__.co_names for forward in others)


def wrappers_of(options: dict[str, Any], is_model_options: bool = False) -> list[Any]:
    """The wrappers in a call's transformer_options, or in the model_options that have those."""
    kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    return comfy.patcher_extension.get_all_wrappers(kind, options, is_model_options)


def by_name(native: NativeClass, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the native class's `_forward` by name, without those that have their default value.

    The first two, latent and timestep, are called `x` and `timestep` for every class.
    """
    signature = inspect.signature(native._forward)
    bound = signature.bind(None, *arguments, **named).arguments
    values: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            values |= value
        elif value is not signature.parameters[name].default:
            values[name] = value
    first, second = list(signature.parameters)[1:3]
    return {"x": values.pop(first), "timestep": values.pop(second)} | values


def native_config(tensors: dict[str, torch.Tensor], stated: Mapping[str, Any] | None) -> Any:
    """The object of ComfyUI's supported_models for a file with these tensors, which may be on the meta device. None: it has
    no such model. `stated`: of the file's header, which detection reads as its metadata; None: it cannot be read.

    ValueError if ComfyUI's detection fails, as it does for a header that it cannot read, or a tensor with too few axes.
    """
    metadata = None
    if stated is None or stated:
        metadata = {"config": "" if stated is None else json.dumps({"transformer": dict(stated)})}
    try:
        return comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    except Exception as error:  # of any kind: ComfyUI's code may ask for what a damaged file has not
        raise ValueError(
            f"model_name: ComfyUI cannot tell which model this is ({type(error).__name__}: {short(error, 200)}). The file "
            "is damaged, or made by a tool that ComfyUI does not know."
        ) from error


def on_meta(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Tensors of these shapes, without memory."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
