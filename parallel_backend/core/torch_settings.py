"""torch's settings of a process that change how fast or how exactly it computes, so that ranks compute as ComfyUI does.

ComfyUI sets them by its start options (--fast, --deterministic); other nodes set them directly. A rank is a process of its
own and would have torch's defaults.
"""

import logging
import operator
from collections.abc import Callable, Mapping
from functools import partial

import torch

log = logging.getLogger(__name__)

Settings = dict[str, bool | str]
"""Name in torch -> value."""

ATTRIBUTES = (
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
)
"""The older name of a setting comes before the newer one: after one was written, the other has the value too."""
FUNCTIONS = {
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed": "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
}
"""Function that reads a setting -> function that writes it."""
DETERMINISTIC, WARN_ONLY = "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"


def read_settings() -> Settings:
    """Settings of this process. Settings that this torch lacks, or that were set under another name, are left out."""
    found: Settings = {}
    for name in (*ATTRIBUTES, *FUNCTIONS, DETERMINISTIC, WARN_ONLY):
        try:
            value = operator.attrgetter(name)(torch)
            found[name] = value() if callable(value) else value
        except (AttributeError, RuntimeError):
            continue
    return found


def write_settings(wanted: Mapping[str, bool | str]) -> None:
    """Set the settings that differ in this process. A setting that this torch does not accept is logged."""
    for name, value in wanted.items():
        if name not in (DETERMINISTIC, WARN_ONLY) and read_settings().get(name) != value:
            try:
                _writer(name)(value)
            except (AttributeError, RuntimeError) as error:
                log.warning("torch.%s could not be set to %s, which ComfyUI uses (%s)", name, value, error)
    own, deterministic, warn_only = read_settings(), bool(wanted.get(DETERMINISTIC)), bool(wanted.get(WARN_ONLY))
    if (own[DETERMINISTIC], own[WARN_ONLY]) != (deterministic, warn_only):
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _writer(name: str) -> Callable[[bool | str], object]:
    if name in FUNCTIONS:
        return operator.attrgetter(FUNCTIONS[name])(torch)
    owner, _, attribute = name.rpartition(".")
    return partial(setattr, operator.attrgetter(owner)(torch), attribute)
