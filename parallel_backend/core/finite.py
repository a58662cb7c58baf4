"""Whether values are finite."""

import torch

NAMED = 3
"""Tensors that are named at most."""


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Not finite if one of them is not. Finite ones overflow fp16; the other types have float32's range, or more."""
    return values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)


def all_finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity in it. One pass where that is so: the sum of finite values hardly ever overflows float32."""
    if not tensor.is_floating_point() or bool(checksum(tensor).isfinite()):
        return True
    return bool(tensor.isfinite().all())
