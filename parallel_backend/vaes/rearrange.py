"""Rearrangements between positions and channels, with which autoencoders shrink and enlarge pictures."""

import math
from collections.abc import Sequence

import torch


def space_to_channels(x: torch.Tensor, factors: Sequence[int], channels_first: bool) -> torch.Tensor:
    """[B, C, n1 f1, n2 f2, ...] -> [B, f1 f2 ... C, n1, n2, ...].

    A channel's number is (c, i1, i2, ...) with `channels_first`, else (i1, i2, ..., c); i are positions within a factor.
    """
    batch, channels, *sizes = x.shape
    pairs = [value for size, factor in zip(sizes, factors, strict=True) for value in (size // factor, factor)]
    x = x.reshape(batch, channels, *pairs)
    inner, outer = range(3, x.ndim, 2), range(2, x.ndim, 2)
    order = (0, 1, *inner, *outer) if channels_first else (0, *inner, 1, *outer)
    return x.permute(order).flatten(1, 1 + len(factors))


def channels_to_space(x: torch.Tensor, factors: Sequence[int], channels_first: bool) -> torch.Tensor:
    """The inverse of space_to_channels."""
    batch, channels, *sizes = x.shape
    count, rest = len(factors), channels // math.prod(factors)
    split = (rest, *factors) if channels_first else (*factors, rest)
    x = x.reshape(batch, *split, *sizes)
    start = 2 if channels_first else 1
    pairs = [value for index in range(count) for value in (2 + count + index, start + index)]
    x = x.permute(0, 1 if channels_first else 1 + count, *pairs)
    return x.reshape(batch, rest, *(size * factor for size, factor in zip(sizes, factors, strict=True)))
