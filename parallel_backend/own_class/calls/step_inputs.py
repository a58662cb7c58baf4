"""Inputs of a rank's model in one micro-step."""

from dataclasses import dataclass
from typing import Any

import torch

from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import TokenOrder


@dataclass(frozen=True)
class StepInputs:
    """One micro-step. All tensors are on the rank's device and have the rank's b batch entries."""

    x: torch.Tensor
    """Tokens [b, n, C]: the rank's shard of the band's packed latent, in the order of `token_order`."""

    x_companion: torch.Tensor
    """Tokens [b, a, C] of the companion latent, with channels padded to those of `x`. a = 0: the micro-step has none."""

    timestep: torch.Tensor
    """The sampler's timestep, float32: [b], or [b, T] with a time for each latent frame, or [b, N, 1] with a time for each
    token of the whole video."""

    tensors: dict[str, torch.Tensor]
    """Conditioning tensors."""

    grid: tuple[int, ...]
    """The picture's tokens along its axes."""

    token_order: TokenOrder
    """The order of the call's image tokens."""

    image: Span
    """The rank's image tokens, in that order."""

    kept: dict[Any, Any]
    """Cache shared by all micro-steps with the same tokens and the same conditioning."""

    companion_tokens: int = 0
    """Tokens of the whole companion latent (patching.Companion)."""
