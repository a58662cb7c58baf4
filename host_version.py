"""Which ComfyUI the pack may be loaded by. Imports none of it but the file that says its version."""

import importlib
import re

OLDEST = (0, 3, 64)
"""The oldest ComfyUI that it is tested in (tests/comfyui/test_oldest.py), and `requires-comfyui` of pyproject.toml."""


def check_comfyui() -> None:
    """RuntimeError, saying what to do, in a ComfyUI older than OLDEST. A version without numbers is let pass."""
    try:
        version = importlib.import_module("comfyui_version").__version__
        numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
        if numbers is None or tuple(map(int, numbers[1].split("."))) >= OLDEST:
            return
        found = f"is {version}"
    except ImportError:
        found = "is so old that it does not say its version"
    oldest = ".".join(map(str, OLDEST))
    raise RuntimeError(f"Parallel DiT needs ComfyUI {oldest} or newer, and this one {found}. Update ComfyUI and restart it.")
