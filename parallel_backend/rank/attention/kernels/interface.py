"""Signatures of `attend` and `attend_lse`, the functions of a kernel's module. Letters of shapes: rank/attention."""

from typing import Protocol

import torch


class Attend(Protocol):
    """Attention of every query to all keys: [B, Q, H, D].

    The last axis is contiguous, the others may have any strides. A kernel must not write to its arguments, since keys and
    values may be views of the K/V buffer. `mask_BK`: bool, True for keys that are seen; None, all keys. It is None for a
    kernel whose row does not say `masks`. Scale None: D ** -0.5.
    """

    def __call__(
        self,
        q_BQHD: torch.Tensor,
        k_BKHD: torch.Tensor,
        v_BKHD: torch.Tensor,
        mask_BK: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor: ...


class AttendLse(Protocol):
    """As Attend, and the natural logarithm of the summed exponentials of the scores, [B, Q, H] float32.

    Where the mask leaves no key: zeros, and -inf.
    """

    def __call__(
        self,
        q_BQHD: torch.Tensor,
        k_BKHD: torch.Tensor,
        v_BKHD: torch.Tensor,
        mask_BK: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
