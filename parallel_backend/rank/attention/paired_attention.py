"""Attention of two streams of a video's tokens (blocks.PAIRED) on one device."""

from collections.abc import Sequence

import torch

from .kernel_choice import RankKernel
from .ring import merge


def paired_attention(
    kernel: RankKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rows: Sequence[torch.Tensor],
    key_rows: Sequence[torch.Tensor],
    scale: float | None,
) -> torch.Tensor:
    """Queries [b, q, H, 2 D], two of [b, k, H, 2 D] -> [b, q, H, 2 D].

    `query_rows`, `key_rows`: by frame, the rows that are its tokens. The first stream's attention to itself and that to a
    frame of the second are merged by log-sum-exp.
    """
    (first, second), (keys, other_keys), (values, other_values) = (x.chunk(2, dim=-1) for x in (query, key, value))
    out, lse = kernel.attend_lse(first, keys, values, None, scale)
    out = out.to(query.dtype)
    for rows, others in list(zip(query_rows, key_rows, strict=True))[1:]:
        if len(rows) and len(others):
            part = kernel.attend_lse(first[:, rows], other_keys[:, others], other_values[:, others], None, scale)
            out[:, rows] = merge((out[:, rows], lse[:, rows]), part)[0].to(query.dtype)
    posed = torch.cat(list(key_rows[1:]))
    if not len(posed):
        return torch.cat((out, torch.zeros_like(second)), dim=-1)
    other = kernel.attend(second, other_keys[:, posed], other_values[:, posed], None, scale)
    return torch.cat((out, other), dim=-1)
