"""Changes the environment that a rank inherits from ComfyUI. This module only needs the standard library, because torch
reads these variables when it is imported."""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping, MutableMapping

from parallel_backend.core.devices import device_kind, on_ray

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with settings of torch's CUDA allocator, the newest name first."""
USUAL_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The name that every version reads: torch 2.9 ignores expandable_segments under newer names (pytorch issue 183387)."""
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
    """Return variable to change -> its value; None: to be removed. Removes `backend:cudaMallocAsync`. `segments`: turn on
    expandable segments unless the user has set them. Other settings stay."""
    # ComfyUI sets `backend:cudaMallocAsync` for itself. Ranks ran out of memory with it where torch's allocator does not
    # (raylight pull request 99: Ulysses, at the second step).
    settings = {name: _options(environment[name]) for name in ALLOCATOR_VARIABLES if name in environment}
    kept = {name: [option for option in options if option != ASYNC] for name, options in settings.items()}
    # Expandable segments leave no holes behind activations of other sizes. NCCL cannot register such memory, and torch does
    # not ask it to (ProcessGroupNCCL).
    if segments and not any(option.startswith(f"{SEGMENTS}:") for options in kept.values() for option in options):
        # torch reads one of the variables only: the first that is set.
        read = next((name for name in ALLOCATOR_VARIABLES if kept.get(name)), USUAL_VARIABLE)
        kept[read] = [*kept.get(read, []), f"{SEGMENTS}:True"]
    values = {name: ",".join(options) or None for name, options in kept.items()}
    return {name: value for name, value in values.items() if value != environment.get(name)}


def _options(text: str) -> list[str]:
    """Return the comma-separated options. Commas in brackets do not separate: `roundup_power2_divisions:[256:1,512:2]` is
    one option."""
    return [option for part in re.split(r",(?![^\[]*\])", text) if (option := re.sub(r"\s", "", part))]


def segments_supported() -> bool:
    """Whether torch supports expandable segments on this system; otherwise it would warn. False under WSL."""
    return sys.platform == "linux" and "microsoft" not in platform.uname().release.lower() and not _built_for_rocm()


def _built_for_rocm() -> bool:
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def only_gpu(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a process sees only `device`, such as cuda:1, as cuda:0. For Windows,
    where copies to a GPU fail once a process has queried a second one (ComfyUI issue 15255)."""
    index = int(device.partition(":")[2] or 0)
    variables = {}
    for name in VISIBLE_VARIABLES:
        visible = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        if visible or name == VISIBLE_VARIABLES[0]:
            variables[name] = visible[index] if visible else str(index)
    return variables
