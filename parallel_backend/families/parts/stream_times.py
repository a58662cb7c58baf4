"""The times of a stream of tokens, where tokens may be at different ones (LTX-2)."""

from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Times as a model's time embedding takes them, float32."""

    own: torch.Tensor
    """[u]: the distinct times of all tokens of the stream."""
    rows: torch.Tensor | None
    """[b, n]: number of each of the rank's tokens' time. None: there is one time."""
    latest: torch.Tensor
    """[b]: the latest time of the stream's tokens."""
