"""Packages that only some benchmarks need, and that the pack does not require."""

import importlib.util

PACKAGES = {"comfy_kitchen": "comfy-kitchen==0.2.31", "sklearn": "scikit-learn"}
"""Module -> what pip installs it by."""


def need(module: str, purpose: str) -> None:
    """SystemExit with the command that installs `module`, where this Python has none. `purpose`: what it is needed for."""
    if importlib.util.find_spec(module) is None:
        raise SystemExit(f"{purpose} needs {module}, which is not installed: python -m pip install {PACKAGES[module]}")
