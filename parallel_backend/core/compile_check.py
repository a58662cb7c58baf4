"""Checks, before ranks start, that this machine has the packages and compilers that torch.compile needs."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from .devices import on_ray

TRITON_CAPABILITY = (7, 0)
"""Compute capability that Triton needs: Volta."""


def check_compile(devices: tuple[str, ...]) -> None:
    """Raise ValueError, naming the widget, if blocks cannot be compiled for these devices. Ray devices are not checked."""
    for reason in filter(None, map(_reason, sorted({device for device in devices if not on_ray(device)}))):
        raise ValueError(f"compile: {reason} Install that, or turn compile off.")


def _reason(device: str) -> str | None:
    if device.startswith("cuda"):
        if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
            return f"torch.compile cannot compile for {device}, which is older than compute capability 7.0."
        if importlib.util.find_spec("triton") is None:
            package = "triton-windows" if sys.platform == "win32" else "triton"
            return f"torch.compile needs the package {package}, which is not in ComfyUI's environment."
        if sys.platform == "win32":  # triton-windows contains a compiler
            return None
        if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang") if name):
            return "torch.compile needs a C compiler (gcc or clang), and none is on the PATH."
    elif shutil.which(compiler := cpp_compiler()) is None:
        return f"torch.compile needs the C++ compiler {compiler}, which is not on the PATH."
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "torch.compile needs Python's headers, which are missing (on Debian and Ubuntu the package python3-dev)."
    return None


def cpp_compiler() -> str:
    """The C++ compiler that torch calls for code on CPUs."""
    return os.environ.get("CXX", {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++"))
