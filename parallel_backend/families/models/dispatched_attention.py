"""Attention for the classes of this package through diffusers' dispatcher, where rank/attention takes part."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [s, D], float32. Neighbouring channels are a pair, so each value occurs twice."""


class DispatchedAttention:
    """An attention module's `processor`: queries, keys and values [B, s, H, D] -> [B, s, H x D]."""

    _attention_backend: Any = AttentionBackendName.NATIVE
    _parallel_config: Any = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend, parallel = self._attention_backend, self._parallel_config
        return dispatch_attention_fn(query, key, value, backend=backend, parallel_config=parallel).flatten(2)


def rotary_pairs(angles: torch.Tensor) -> Rotary:
    """Angles [s, D / 2] float32 -> cosines and sines [s, D]."""
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def rotated(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """[B, s, H, D] -> the same shape, rotated in float32."""
    return apply_rotary_emb(heads, rotary, sequence_dim=1)
