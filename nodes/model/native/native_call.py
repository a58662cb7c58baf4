"""Runs ComfyUI's DIFFUSION_MODEL wrappers, with which other nodes wrap the native model's forward, around the ranks' call.

A wrapper gets the arguments that the native class's `forward` passes to its `_forward`, in that order. So that `forward` is
called with RemoteDiffusionModel as `self`: it runs the wrappers, and inside them RemoteDiffusionModel._forward.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.patcher_extension

from parallel_backend.own_class.calls.patching import Latents

NativeClass = type[Any]
"""The native model's class, a torch Module with `forward` and mostly `_forward`. ComfyUI has no common base class for
them."""


@dataclass(frozen=True)
class NativeArguments:
    """A call of the native model, as its class gets it inside of wrappers."""

    latents: Latents
    timestep: Any
    others: Mapping[str, Any]
    """Other arguments by name, such as `context`."""
    options: dict[str, Any]
    """The call's transformer_options."""


def is_plain(value: Any) -> bool:
    """Whether the value can be stored as JSON."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def runs_wrappers(native: NativeClass) -> bool:
    """Whether the native class's `forward` runs wrappers. Some classes, such as PixArt's, ignore wrappers."""
    return "WrapperExecutor" in native.forward.__code__.co_names


def leaves_wrappers_to_parent(native: NativeClass) -> bool:
    """Whether only the `forward` of a parent class runs wrappers, as for LTX-2. The native class calls it by `super()`,
    which needs an object of the class: it cannot run around the ranks' call."""
    forwards = (vars(base)["forward"] for base in native.__mro__ if "forward" in vars(base))
    others = (forward for forward in forwards if hasattr(forward, "__code__"))
    return not runs_wrappers(native) and any("WrapperExecutor" in forward.__code__.co_names for forward in others)


def wrappers_of(options: dict[str, Any], is_model_options: bool = False) -> list[Any]:
    """Return the wrappers in a call's transformer_options, or in the model_options that contain those."""
    kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    return comfy.patcher_extension.get_all_wrappers(kind, options, is_model_options)


def by_name(native: NativeClass, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the native class's `_forward` by name, without those that have their default value. The first
    two, latent and timestep, are called `x` and `timestep` for every class."""
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
