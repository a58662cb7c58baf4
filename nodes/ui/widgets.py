"""Widgets and types that several nodes share. Each function returns an input's entry in INPUT_TYPES: (type, options)."""

from typing import Any

from parallel_backend.placement.residency import AUTO

CATEGORY = "Parallel DiT"
_OTHERS = "xdit", "xfuser", "usp", "raylight"
SEVERAL_GPUS = "multi gpu", "multigpu", "multiple gpus", "second gpu", "parallel", "distributed", *_OTHERS
"""Search words for nodes that use several GPUs (SEARCH_ALIASES)."""
MAX_DEGREE = 64

Widget = tuple[Any, dict[str, Any]]


def link(kind: str, tooltip: str) -> Widget:
    """Return an input without a widget, for a link of this type."""
    return (kind, {"tooltip": tooltip})


def flag(default: bool, tooltip: str) -> Widget:
    return ("BOOLEAN", {"default": default, "tooltip": tooltip})


def text(default: str, tooltip: str) -> Widget:
    return ("STRING", {"default": default, "tooltip": tooltip})


def choice(values: list[str], default: str, tooltip: str) -> Widget:
    return (values, {"default": default, "tooltip": tooltip})


def whole_number(default: int, least: int, most: int, tooltip: str, **options: Any) -> Widget:
    return ("INT", {"default": default, "min": least, "max": most, **options, "tooltip": tooltip})


def degree(tooltip: str) -> Widget:
    """Return a widget for a degree of parallelism."""
    return whole_number(1, 1, MAX_DEGREE, tooltip)


def share(default: float, tooltip: str) -> Widget:
    """Return a widget for a number from 0 to 1."""
    return ("FLOAT", {"default": default, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": tooltip})


def offload() -> Widget:
    """Return the widget for the text that residency.offload_of parses."""
    return text(
        AUTO,
        "auto: weights that do not fit on the GPUs stay in host memory. They are copied to a GPU when they are needed, "
        "during computation. none: refuses a model that does not fit. A number: like auto, but keeps that many GB of "
        "each GPU free.",
    )


def threshold(default: float, tooltip: str) -> Widget:
    """Return the widget for CacheSettings.threshold."""
    return ("FLOAT", {"default": default, "min": 0.0, "max": 3.0, "step": 0.005, "round": 0.001, "tooltip": tooltip})


def decibels(tooltip: str) -> Widget:
    """Return a widget for a closeness in dB. 0: none is asked for."""
    return ("FLOAT", {"default": 0.0, "min": 0.0, "max": 100.0, "step": 1.0, "tooltip": tooltip})


def cfg_scale(tooltip: str) -> Widget:
    """Return the widget for classifier-free guidance, as in KSampler, but with the default 1, which distilled models
    need."""
    return ("FLOAT", {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01, "tooltip": tooltip})
