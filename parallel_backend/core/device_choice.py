"""The `devices` widget: the device of each rank, and errors that say how to get more devices."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .degrees import Degrees
from .devices import device_kind, names_ray, ray_devices
from .validate import check_devices, check_one_kind, check_ranks

OTHER_KINDS = {
    "mps": "an Apple GPU (MPS)",
    "xpu": "an Intel GPU (XPU)",
    "npu": "an Ascend NPU",
    "mlu": "a Cambricon MLU",
    "privateuseone": "DirectML",
}
"""Device types, by torch's names, that ComfyUI supports and ranks do not -> name for the user."""
ON_CPUS = "Write cpu,cpu into devices for two ranks on the CPU, which is slow."
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Host:
    """ComfyUI's device, and its options about GPUs."""

    kind: str = "cuda"
    """Torch's name for the type of the device; `cpu` under --cpu."""
    cuda_device: str | None = None
    """Value of --cuda-device. None: the option is not set."""


def is_auto(text: str) -> bool:
    """Whether the `devices` widget leaves the choice to the pack."""
    return text.strip().lower() in ("auto", "")


def all_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process sees, of NVIDIA (CUDA) or AMD (ROCm)."""
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def gpus_of(host: Host) -> tuple[str, ...]:
    """Return the GPUs for `auto`: none if ComfyUI runs on another type of device."""
    return all_gpus() if host.kind == "cuda" else ()


def choose_devices(text: str, degrees: Degrees, host: Host, all_known: bool = True) -> tuple[str, ...]:
    """Return the device of each rank. `auto`: the first GPUs, or the CPU if ComfyUI runs on the CPU.

    `all_known`: as in check_devices. Raises ValueError, naming the widget, for too few or unknown devices, and if ComfyUI
    runs on a device that cannot have ranks.
    """
    check_ranks(degrees)
    if is_auto(text):
        gpus = _auto_gpus(host)
        if gpus is None:
            return ("cpu",) * degrees.world
        if len(gpus) < degrees.world:
            change = f"Lower the degrees so that their product is at most {len(gpus)}, or name a GPU more than once."
            raise ValueError(
                f"devices: {change if gpus else ON_CPUS} {degrees} needs {degrees.world} GPUs, but ComfyUI shows "
                f"{len(gpus)} on this machine.{why_hidden(host)}"
            )
        return gpus[: degrees.world]
    devices = ray_devices(text, degrees.world) if names_ray(text) else named_devices(text, host)
    check_devices(degrees, devices, all_known)
    return devices


def possible_devices(text: str, host: Host) -> tuple[str, ...]:
    """Return the devices among which degrees `auto` choose. With `devices` auto: every GPU, or one CPU rank, which has all
    cores. Raises ValueError for a mixture of GPUs and CPUs."""
    if not is_auto(text):
        devices = named_devices(text, host)
        check_one_kind(devices)
        return devices
    return _auto_gpus(host) or ("cpu",)


def named_devices(text: str, host: Host) -> tuple[str, ...]:
    """Return the devices of a list such as cuda:0,cuda:1 or ray:cuda,cuda. Raises ValueError for a device that does not
    exist here."""
    if names_ray(text):
        return ray_devices(text)
    devices = tuple(part.strip() for part in text.split(","))
    known = {"cpu", *all_gpus()}
    for name in devices:
        if name in known or re.fullmatch(r"cpu:\d{1,3}", name):
            continue
        kind = device_kind(name)
        if kind in OTHER_KINDS:
            raise ValueError(f"devices: {name[:40]} is {OTHER_KINDS[kind]}, on which ranks cannot run. {_instead()}")
        hint = why_hidden(host) if kind == "cuda" else ""
        if known == {"cpu"}:
            hint = f" {ON_CPUS}{hint}"
        raise ValueError(
            f"devices: {_short(name)} is not a device of this machine, which has {', '.join(sorted(known))}.{hint}"
        )
    return devices


def why_hidden(host: Host, environment: Mapping[str, str] = os.environ) -> str:
    """Return a sentence, with a leading space, that says how to have ComfyUI show hidden GPUs. Empty if no option hides
    GPUs. It is unknown whether there are hidden GPUs, because this process cannot see them."""
    if host.kind != "cuda":
        return ""
    options = "--cuda-device all"
    if sys.platform == "win32":
        options += " --disable-pinned-memory"  # with several GPUs page-locked copies fail on Windows
    if host.cuda_device not in (None, "all"):
        option = f"--cuda-device {host.cuda_device}"
        return f" ComfyUI was started with {option}, which hides all other GPUs: restart it with {options}."
    variable = next((name for name in VISIBLE if name in environment), None)
    if variable is None:
        return ""
    if sys.platform == "win32" and host.cuda_device is None and environment[variable] == "0":
        return f" On Windows ComfyUI shows the first GPU only, unless it is started with {options}."
    return (
        f" {variable} is '{environment[variable]}' in ComfyUI's environment, which hides all other GPUs: remove it, or list "
        "the numbers of all in it, such as 0,1, and restart ComfyUI."
    )


def _auto_gpus(host: Host) -> tuple[str, ...] | None:
    """GPUs for `auto`. None: ComfyUI runs on the CPU. Raises ValueError if ComfyUI's device cannot have ranks."""
    if host.kind == "cpu":
        return None
    if host.kind != "cuda":
        what = OTHER_KINDS.get(host.kind, host.kind)
        raise ValueError(f"devices: ComfyUI runs on {what} here, on which ranks cannot run. {_instead()}")
    return gpus_of(host)


def _instead() -> str:
    return (
        "Ranks run on NVIDIA GPUs (CUDA), on AMD GPUs (ROCm, never tried) and on CPUs. Use ComfyUI's own Load Diffusion "
        "Model here. Or write cpu into devices, once for each rank, which is slow."
    )


def _short(name: str) -> str:
    return repr(name if len(name) <= 60 else f"{name[:60]}...")
