"""What a rank's environment has otherwise than ComfyUI's, whose it inherits. The standard library alone: torch reads these
variables as it is imported."""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping, MutableMapping

from parallel_backend.core.devices import device_kind, on_ray

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch takes its CUDA allocator's settings from, by age: the newest first."""
USUAL_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The one that every version heeds: torch 2.9 reads expandable_segments from no newer one (pytorch issue 183387)."""
ASYNC = "backend:cudaMallocAsync"
SEGMENTS = "expandable_segments"
VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def set_rank_environment(device: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set up `environment`, this process's, for a rank on `device`, named as in the `devices` widget."""
    if device_kind(device) != "cuda":
        return
    changes: dict[str, str | None] = dict(allocator_settings(environment, segments_supported()))
    if sys.platform == "win32" and not on_ray(device):
        changes |= only_gpu(device, environment)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value


def allocator_settings(environment: Mapping[str, str], segments: bool) -> dict[str, str | None]:
    """The variables to change -> their values, None for none.

    ComfyUI sets `backend:cudaMallocAsync` for itself. In ranks it ran out of memory where torch's own allocator does not
    (raylight pull request 99: Ulysses, at the second step). `segments`: expandable ones, which do not leave holes behind
    activations of other sizes, are turned on unless the user has set them. NCCL takes them: what it cannot do with them,
    register the allocator's memory, torch then leaves (ProcessGroupNCCL). Other settings stay.
    """
    settings = {name: _options(environment[name]) for name in ALLOCATOR_VARIABLES if name in environment}
    kept = {name: [option for option in options if option != ASYNC] for name, options in settings.items()}
    if segments and not any(option.startswith(f"{SEGMENTS}:") for options in kept.values() for option in options):
        # torch reads one of the variables only: the first that is set.
        heeded = next((name for name in ALLOCATOR_VARIABLES if kept.get(name)), USUAL_VARIABLE)
        kept[heeded] = [*kept.get(heeded, []), f"{SEGMENTS}:True"]
    values = {name: ",".join(options) or None for name, options in kept.items()}
    return {name: value for name, value in values.items() if value != environment.get(name)}


def _options(text: str) -> list[str]:
    """Parts between commas, but for those in brackets: `roundup_power2_divisions:[256:1,512:2]` is one."""
    return [option for part in re.split(r",(?![^\[]*\])", text) if (option := re.sub(r"\s", "", part))]


def segments_supported() -> bool:
    """Whether this torch has expandable segments here. Elsewhere it warns and goes without; WSL's driver is not trusted."""
    return sys.platform == "linux" and "microsoft" not in platform.uname().release.lower() and not _built_for_rocm()


def _built_for_rocm() -> bool:
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def only_gpu(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a process sees `device`, such as cuda:1, and no other GPU: there it is called cuda:0.

    For Windows, where copies to a GPU fail once a process has looked at a second one (ComfyUI issue 15255).
    """
    index = int(device.partition(":")[2] or 0)
    found = {}
    for name in VISIBLE_VARIABLES:
        visible = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        if visible or name == VISIBLE_VARIABLES[0]:
            found[name] = visible[index] if visible else str(index)
    return found
