"""What a kernel's module has."""

from typing import Protocol

import torch


class Attend(Protocol):
    """[B, q, H, D], two of [B, k, H, D], key mask [B, k] bool (True: seen) or None, scale -> [B, q, H, D].

    The last axis is contiguous, the others may have any strides. The arguments stay as they are: keys and values may be
    the K/V buffer. The mask is None for a kernel whose row does not say `masks`. Scale None: D ** -0.5.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor: ...


class AttendLse(Protocol):
    """As Attend, and the natural logarithm of the summed exponentials of the scores, [B, q, H] float32.

    Where the mask leaves no key: zeros, and -inf.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
