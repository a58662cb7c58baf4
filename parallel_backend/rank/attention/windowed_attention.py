"""Attention in windows of a video (blocks.WINDOWS) on one device."""

import torch

from .kernel_choice import RankKernel
from .token_groups import GroupsWithText


def windowed_attention(
    kernel: RankKernel,
    q_BQHD: torch.Tensor,
    k_BKHD: torch.Tensor,
    v_BKHD: torch.Tensor,
    queries: GroupsWithText,
    keys: GroupsWithText,
    scale: float | None,
) -> torch.Tensor:
    """[B, Q, H, D]. Groups are windows: of the rows of queries, and of those of keys, which are of all tokens."""
    # One index for all windows: as many bytes as one for each, in a fraction of the kernels.
    q_BqHD, k_BkHD, v_BkHD = q_BQHD[:, queries.rows_N], k_BKHD[:, keys.rows_N], v_BKHD[:, keys.rows_N]
    outs = [
        kernel.attend(q_BqHD[:, rows.slice], k_BkHD[:, seen.slice], v_BkHD[:, seen.slice], None, scale)
        for rows, seen in zip(queries.spans, keys.spans, strict=True)
        if len(rows)
    ]
    if not outs:
        return torch.empty_like(q_BQHD)
    words, out_BQHD = len(queries.text_T), torch.empty_like(q_BQHD)
    of_video, of_text = zip(*(out.split((out.shape[1] - words, words), dim=1) for out in outs), strict=True)
    out_BQHD[:, queries.video_V] = torch.cat(of_video, dim=1)
    if words:
        out_BQHD[:, queries.text_T] = torch.stack(of_text).mean(0)
    return out_BQHD
