"""The `devices` widget: the functions of core/device_choice.py for the devices and start options of this ComfyUI."""

import comfy.cli_args
import comfy.model_management
import torch

from parallel_backend.core import device_choice
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.device_choice import Host, gpus_of
from parallel_backend.core.device_choice import is_auto as is_auto
from parallel_backend.core.devices import device_kind, on_ray
from parallel_backend.core.dtypes import HALVES, native_halves


def host() -> Host:
    """Return the kind of device that this ComfyUI runs on, and its start options about devices."""
    return Host(comfy.model_management.get_torch_device().type, comfy.cli_args.args.cuda_device)


def gpus() -> tuple[str, ...]:
    """Return the GPUs that `auto` means; empty if ComfyUI runs on another kind of device."""
    return gpus_of(host())


def choose_devices(text: str, degrees: Degrees, all_known: bool = True) -> tuple[str, ...]:
    return device_choice.choose_devices(text, degrees, host(), all_known)


def named_devices(text: str) -> tuple[str, ...]:
    return device_choice.named_devices(text, host())


def possible_devices(text: str) -> tuple[str, ...]:
    return device_choice.possible_devices(text, host())


def check_devices(devices: str | None) -> None:
    """Raise ValueError for a list with a device that this machine does not have. None: another node's output is
    connected."""
    if devices is not None and not is_auto(devices):
        named_devices(devices)


def check_one_kind_of_devices(devices: str | None) -> None:
    """Like check_devices, but raise ValueError for a mixture of GPUs and CPUs, too."""
    if devices is not None and not is_auto(devices):
        possible_devices(devices)


def why_hidden() -> str:
    return device_choice.why_hidden(host())


def half_dtypes(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Half dtypes (HALVES) that all GPUs among the devices compute in, by ComfyUI's tests and options (--force-fp16 ...).

    GPUs of a Ray cluster are not tested; they are assumed to compute in both. A ComfyUI under --cpu cannot test GPUs, so
    torch is asked.
    """
    local = [name for name in devices if device_kind(name) == "cuda" and not on_ray(name)]
    if host().kind != "cuda":
        return tuple(half for half in HALVES if all(half in native_halves(name) for name in local))
    management = comfy.model_management
    uses = {"bf16": management.should_use_bf16, "fp16": management.should_use_fp16}
    return tuple(half for half in HALVES if all(uses[half](torch.device(name)) for name in local))
