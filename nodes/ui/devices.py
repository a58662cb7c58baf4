"""The `devices` widget: which device each rank gets."""

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.devices import names_ray, ray_devices
from parallel_backend.core.validate import check_devices, check_ranks

from .input_checks import short


def choose_devices(text: str, degrees: Degrees) -> tuple[str, ...]:
    """The device of each rank. `auto`: the first CUDA devices, or CPU ranks where there is none."""
    check_ranks(degrees)
    if names_ray(text):
        devices = ray_devices(text, degrees.world)
        check_devices(degrees, devices)
        return devices
    available = torch.cuda.device_count()
    if is_auto(text):
        if available == 0:
            return ("cpu",) * degrees.world
        if available < degrees.world:
            raise ValueError(
                f"devices: {degrees} needs {degrees.world} GPUs, this machine has {available}. Lower the degrees so "
                f"that their product is at most {available}, or name the devices (a GPU may be named more than once)."
            )
        return all_gpus()[: degrees.world]
    devices = named_devices(text)
    check_devices(degrees, devices)
    return devices


def is_auto(text: str) -> bool:
    """The `devices` widget leaves the choice to the pack."""
    return text.strip().lower() in ("auto", "")


def all_gpus() -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def named_devices(text: str) -> tuple[str, ...]:
    """The devices of a list such as cuda:0,cuda:1 or ray:cuda,cuda. ValueError for one that this machine does not have."""
    if names_ray(text):
        return ray_devices(text)
    devices = tuple(part.strip() for part in text.split(","))
    known = {"cpu", *all_gpus()}
    for name in devices:
        if name not in known:
            raise ValueError(f"devices: {short(name)} is no device of this machine, which has {', '.join(sorted(known))}.")
    return devices


def possible_devices(text: str) -> tuple[str, ...]:
    """Devices that degrees `auto` may use. Where `devices` is auto: every GPU, or one CPU rank, which has all cores."""
    return (all_gpus() or ("cpu",)) if is_auto(text) else named_devices(text)
