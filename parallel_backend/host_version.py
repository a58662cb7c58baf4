"""Which ComfyUI the pack may be loaded by. Imports none of it but the file that says its version."""

import importlib
import re

OLDEST = (0, 3, 64)
"""The oldest ComfyUI that it is tested in (tests/comfyui/test_oldest.py), and `requires-comfyui` of pyproject.toml."""


def check_comfyui() -> None:
    """RuntimeError, saying what to do, in a ComfyUI older than OLDEST. One that does not say its version may be any."""
    try:
        version = importlib.import_module("comfyui_version").__version__
    except ImportError:  # before 0.3.5 it said none
        version = "0"
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if numbers and tuple(map(int, numbers[1].split("."))) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        found = "This one does not say its version" if version == "0" else f"This one is {version}"
        raise RuntimeError(f"Parallel DiT needs ComfyUI {oldest} or newer. {found}: update ComfyUI, then restart it.")
