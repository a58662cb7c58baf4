"""Weight dtypes by name. The client needs them and must not import diffusers."""

import torch

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that weights of dtype `name` are computed in. fp8 is only stored: bf16 on CUDA, fp32 elsewhere."""
    if name.startswith("fp8"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return TORCH_DTYPES[name]
