"""Names of weight dtypes -> torch's. Apart from build.py, since the client needs them and must not import diffusers."""

import torch

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """fp8 is a storage format only: it is computed in bf16 on CUDA and fp32 elsewhere."""
    if name.startswith("fp8"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return TORCH_DTYPES[name]
