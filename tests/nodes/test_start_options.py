"""Which of ComfyUI's start options ranks follow, and what a node says of the others."""

import importlib.util
import sys
import types
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

FILE = Path(__file__).resolve().parents[2] / "nodes/ui/start_options.py"


class Feature(Enum):
    """As ComfyUI's PerformanceFeature."""

    FP16 = "fp16_accumulation"
    FP8 = "fp8_matrix_mult"
    CUBLAS = "cublas_ops"


OFF = dict.fromkeys(
    (
        *("fp32_unet", "fp64_unet", "bf16_unet", "fp16_unet", "fp8_e4m3fn_unet", "fp8_e5m2_unet", "fp8_e8m0fnu_unet"),
        "force_upcast_attention",
    ),
    False,
)


def options(cublas: bool = True, prefers_fp16: bool = False, **args):
    """The module under a ComfyUI that was started with `args`."""
    modules = {
        "comfy": types.ModuleType("comfy"),
        "comfy.cli_args": SimpleNamespace(args=SimpleNamespace(**{"fast": set(), **OFF, **args})),
        "comfy.ops": SimpleNamespace(CUBLAS_IS_AVAILABLE=cublas),
        "comfy.model_management": SimpleNamespace(PRIORITIZE_FP16=prefers_fp16),
    }
    modules["comfy"].ops, modules["comfy"].model_management = modules["comfy.ops"], modules["comfy.model_management"]
    with mock.patch.dict(sys.modules, modules):
        spec = importlib.util.spec_from_file_location("start_options_under_test", FILE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.mark.parametrize(
    ("started", "dtype", "left_out"),
    [
        ({}, "fp16", ""),
        ({"fast": set(Feature)}, "fp16", "--fast=cublas_ops"),
        ({"fast": set(Feature)}, "fp8_e4m3fn/fp16", "--fast=cublas_ops"),
        ({"fast": set(Feature)}, "bf16", ""),
        ({"fast": set(Feature), "cublas": False}, "fp16", ""),  # ComfyUI has no such kernels either
        ({"fp16_unet": True}, "bf16", "--fp16-unet"),
        ({"fp16_unet": True}, "fp16", ""),
        ({"fp8_e5m2_unet": True, "force_upcast_attention": True}, "bf16", "--fp8_e5m2-unet, --force-upcast-attention"),
    ],
)
def test_a_node_names_the_options_that_ranks_do_not_follow(started, dtype, left_out):
    line = options(**started).options_line(dtype, "cuda")
    start = "ranks do not follow these start options of ComfyUI: "
    assert line == (start + left_out if left_out else "")
