"""ComfyUI's start options that change how a model computes, and whether ranks follow them. Settings that they change in
torch, such as by `--fast fp16_accumulation`, reach ranks through core/torch_settings.py. `attention.py` and `devices.py`
follow others.
"""

import comfy.model_management
import comfy.ops
from comfy.cli_args import args

from parallel_backend.core.dtypes import HALVES, compute_name, storage_name

UNET_DTYPES = {
    "fp32_unet": "fp32",
    "fp64_unet": "fp64",
    "bf16_unet": "bf16",
    "fp16_unet": "fp16",
    "fp8_e4m3fn_unet": "fp8_e4m3fn",
    "fp8_e5m2_unet": "fp8_e5m2",
    "fp8_e8m0fnu_unet": "fp8_e8m0fnu",
}
"""Start option by which ComfyUI chooses a model's dtype -> the dtype. On ranks the loader's weight_dtype decides instead."""
FP8_PRODUCTS, CUBLAS = "fp8_matrix_mult", "cublas_ops"


def is_fast(feature: str) -> bool:
    """Return whether ComfyUI was started with `--fast`, for this feature or for all features."""
    return any(getattr(one, "value", one) == feature for one in args.fast or ())


def wanted_halves(halves: tuple[str, ...], allowed: tuple[str, ...], weight_dtype: str) -> tuple[str, ...]:
    """Return the dtypes among `halves` (which the GPUs support) that ranks may use for a model that computes in `allowed`.

    fp16 alone under `--fast fp16_accumulation`, as ComfyUI chooses it, unless weight_dtype says something.
    """
    prefers = getattr(comfy.model_management, "PRIORITIZE_FP16", False) and weight_dtype == "default"
    return ("fp16",) if prefers and "fp16" in halves and "fp16" in allowed else halves


def options_line(dtype: str, kind: str) -> str:
    """Return a line for the node about options that ranks do not follow. Empty: there are none.

    `dtype`: of the model on its ranks. `kind`: of their devices, cuda or cpu.
    """
    names = [name for name, wanted in UNET_DTYPES.items() if getattr(args, name, False) and wanted != storage_name(dtype)]
    left_out = [f"--{name.replace('_unet', '-unet')}" for name in names]
    if is_fast(CUBLAS) and getattr(comfy.ops, "CUBLAS_IS_AVAILABLE", False) and compute_name(dtype, kind) == HALVES[1]:
        left_out.append(f"--fast={CUBLAS}")
    if getattr(args, "force_upcast_attention", False):
        left_out.append("--force-upcast-attention")
    return f"ranks do not follow these start options of ComfyUI: {', '.join(left_out)}" if left_out else ""
