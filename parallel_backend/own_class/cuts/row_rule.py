"""The rule by which a call of attention goes if not every query sees every key."""

from collections.abc import Callable
from typing import Protocol

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""([B, q, H, D], [B, k, H, D], [B, k, H, D]) -> [B, q, H, D]: all of these queries see all of these keys."""


class RowRule(Protocol):
    """A frozen dataclass, hashable and picklable, of the facts of a call, such as a grid of tokens."""

    def __call__(
        self,
        attend: Attend,
        q_BQHD: torch.Tensor,
        k_BKHD: torch.Tensor,
        v_BKHD: torch.Tensor,
        queries_Q: torch.Tensor,
        keys_K: torch.Tensor,
    ) -> torch.Tensor:
        """[B, Q, H, D]. `queries_Q`, `keys_K`: int64 in host memory, the number of each row among all tokens of the call's
        queries, or keys, in the class's order. The rows may be any of them, in any order: a rank's, or a band's. H may be
        some of the heads. `attend` computes by the user's kernel."""
