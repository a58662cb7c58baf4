"""Signatures of `attend` and `attend_lse`, the functions of a kernel's module."""

from collections.abc import Callable

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], torch.Tensor]
"""(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale) -> [B, Q, H, D]: attention of every query to all keys.

The last axis is contiguous, the others may have any strides. A kernel must not write to its arguments, since keys and values
may be views of the K/V buffer. `mask_BK`: bool, True for keys that are seen; None, all keys. It is None for a kernel whose
row does not say `masks`. Scale None: D ** -0.5.
"""

AttendLse = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None], tuple[torch.Tensor, torch.Tensor]
]
"""As Attend, and the natural logarithm of the summed exponentials of the scores, [B, Q, H] float32.

Where the mask leaves no key: zeros, and -inf.
"""
