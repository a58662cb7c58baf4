"""Signatures of `attend` and `attend_lse`, the functions of a kernel's module."""

from collections.abc import Callable

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], torch.Tensor]
"""(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale) -> [B, Q, H, D]: attention of every query to all keys.

The last axis is contiguous; the others may have any strides. A kernel must not write to its arguments, because keys and
values may be views of the K/V buffer. `mask_BK`: bool, True for keys that are seen; None: all. Kernels whose row does not
say `masks` always get None. `scale` None: D ** -0.5.
"""

AttendLse = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], tuple[torch.Tensor, torch.Tensor]
]
"""Like Attend, but also returns the natural logarithm of the sum of the scores' exponentials, [B, Q, H] in float32. Entries
whose mask leaves no key get zeros and -inf."""
