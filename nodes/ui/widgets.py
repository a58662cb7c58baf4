"""Widgets and types that several nodes share."""

from parallel_backend.placement.residency import AUTO

CATEGORY = "Parallel DiT"
MAX_DEGREE = 64


def degree(tooltip: str) -> tuple[str, dict]:
    """An INT widget for a degree of parallelism."""
    return ("INT", {"default": 1, "min": 1, "max": MAX_DEGREE, "tooltip": tooltip})


def offload() -> tuple[str, dict]:
    """A STRING widget for residency.offload_of."""
    return (
        "STRING",
        {
            "default": AUTO,
            "tooltip": "auto: weights that do not fit on the GPUs stay in host memory and are copied to a GPU whenever "
            "they are needed, beside the computing. none: a model that does not fit is refused. A number: as auto, and so "
            "many GB of each GPU stay free.",
        },
    )


def threshold(default: float, tooltip: str) -> tuple[str, dict]:
    """A FLOAT widget for CacheSettings.threshold."""
    return ("FLOAT", {"default": default, "min": 0.0, "max": 3.0, "step": 0.005, "round": 0.001, "tooltip": tooltip})


def cfg_scale(tooltip: str) -> tuple[str, dict]:
    """A FLOAT widget for classifier-free guidance, KSampler's, but 1 as distilled models want it."""
    return ("FLOAT", {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01, "tooltip": tooltip})


class AnyType(str):
    """Type that every link fits: ComfyUI compares types by `!=` of their names."""

    def __ne__(self, other: object) -> bool:
        return False


ANY = AnyType("*")
