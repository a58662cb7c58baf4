"""Finds NaN and infinity."""

import torch


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no NaN and no infinity. One pass if so, because a sum of finite values hardly ever overflows
    float32."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
