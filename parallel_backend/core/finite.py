"""Finds NaN and infinity."""

import torch

NAMED = 3
"""Maximum number of tensors that an error names."""


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Sum of `values`; NaN or infinite if a value is. fp16 is summed in float32, because finite values can overflow fp16."""
    return values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no NaN and no infinity. One pass if so, because a sum of finite values hardly ever overflows."""
    if not tensor.is_floating_point() or bool(checksum(tensor).isfinite()):
        return True
    return bool(tensor.isfinite().all())
