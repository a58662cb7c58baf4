"""Corrects stale keys and values, using the fresh ones that a micro-step has just computed.

Before they are overwritten, the buffer has extrapolated old rows for the tokens of this micro-step. In the call after the
warm-up, which cannot be extrapolated, much of their difference from the fresh rows is common to all tokens, because the
timestep causes it. That common part is applied to rows that are not computed yet. The host never waits for the device here.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

LEAST = 1e-6
"""Added to sums of squares, so that rows of zeros stay as they are."""
TOKENS_AT_ONCE = 1024
"""Number of tokens that are copied to float32 at a time."""


def key_scale(expected_bshD: Sequence[torch.Tensor], fresh_bshD: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the factor by which `expected_bshD` is closest to `fresh_bshD` (least squares), [b, 1, h, 1] float32. Both are
    parts of the same tokens, in order."""
    # Rotary embedding rotates pairs of a key's channels, by an angle that depends on the position. A factor of the whole
    # head commutes with every such rotation. A shift would be right at one position only.
    products: Any = LEAST
    squares: Any = LEAST
    for old_bshD, new_bshD in _pairs(expected_bshD, fresh_bshD):
        old_bshD = old_bshD.float()
        products = products + (old_bshD * new_bshD).sum((1, 3), keepdim=True)
        squares = squares + old_bshD.square().sum((1, 3), keepdim=True)
    return products / squares


def value_shift(expected_bshD: Sequence[torch.Tensor], fresh_bshD: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean over tokens of fresh minus expected values, [b, 1, h, D] float32."""
    sums = [(new_bshD.float() - old_bshD).sum(1, keepdim=True) for old_bshD, new_bshD in _pairs(expected_bshD, fresh_bshD)]
    return functools.reduce(torch.add, sums) / sum(part.shape[1] for part in fresh_bshD)


def _pairs(expected: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for parts in zip(expected, fresh, strict=True):
        if parts[0].shape[1] <= TOKENS_AT_ONCE:
            yield parts
            continue
        yield from zip(*(part.split(TOKENS_AT_ONCE, dim=1) for part in parts), strict=True)
