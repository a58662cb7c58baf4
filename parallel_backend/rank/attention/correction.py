"""How far stale keys and values are off, judged by those that a micro-step has just computed afresh.

What it computes was expected: its own old rows, extrapolated, lie in the buffer until they are overwritten. In the call
behind the warm-up, where there is nothing to extrapolate from, much of the difference is common to all tokens, since it
comes from the timestep. So the other rows are corrected by it.

Nothing here stops the host, and little memory is taken beside the rows.
"""

from collections.abc import Iterator, Sequence

import torch

LEAST = 1e-6
"""Added to sums of squares: rows that are all zero stay as they are."""
AT_ONCE = 1024
"""Tokens of which there are float32 copies at a time."""


def key_scale(expected: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [b, n, h, D] -> [b, 1, h, 1] float32: the factor that takes `expected` closest to `fresh`, by least squares.

    One factor for each head: rotary embedding, of whichever layout, turns keys and leaves it valid at every position. A
    shift would not be (docs/decisions.md).
    """
    both = own = LEAST
    for old, new in _pairs(expected, fresh):
        old = old.float()
        both = both + (old * new).sum((1, 3), keepdim=True)
        own = own + old.square().sum((1, 3), keepdim=True)
    return both / own


def value_shift(expected: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [b, n, h, D] -> [b, 1, h, D] float32: the mean over tokens of what `fresh` has more."""
    more = sum(new.float().sum(1, keepdim=True) - old.float().sum(1, keepdim=True) for old, new in _pairs(expected, fresh))
    return more / sum(part.shape[1] for part in fresh)


def _pairs(expected: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for parts in zip(expected, fresh, strict=True):
        yield from zip(*(part.split(AT_ONCE, dim=1) for part in parts), strict=True)
