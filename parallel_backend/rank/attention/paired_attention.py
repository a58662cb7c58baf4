"""Attention of two streams of a video's tokens (blocks.PAIRED) on one device."""

from collections.abc import Sequence

import torch

from .kernel_choice import RankKernel
from .ring import merge


def paired_attention(
    kernel: RankKernel,
    q_BQHE: torch.Tensor,
    k_BKHE: torch.Tensor,
    v_BKHE: torch.Tensor,
    query_rows: Sequence[torch.Tensor],
    key_rows: Sequence[torch.Tensor],
    scale: float | None,
) -> torch.Tensor:
    """Attention of heads of E = 2 D channels, D of the first stream and D of the second: [B, Q, H, E].

    `query_rows`, `key_rows`: by frame, indices of its tokens.
    """
    (q_BQHD, pose_q_BQHD), (k_BKHD, pose_k_BKHD), (v_BKHD, pose_v_BKHD) = (
        x.chunk(2, dim=-1) for x in (q_BQHE, k_BKHE, v_BKHE)
    )
    out_BQHD, lse_BQH = kernel.attend_lse(q_BQHD, k_BKHD, v_BKHD, None, scale)
    out_BQHD = out_BQHD.to(q_BQHE.dtype)
    # A query of the first stream sees all keys of the first and, of the second, those of its frame. One softmax over both
    # sets is two attentions merged by log-sum-exp; a mask would be as large as the tokens squared.
    for queries, keys in list(zip(query_rows, key_rows, strict=True))[1:]:  # frame 0 has no pose
        if len(queries) and len(keys):
            of_pose = kernel.attend_lse(q_BQHD[:, queries], pose_k_BKHD[:, keys], pose_v_BKHD[:, keys], None, scale)
            out_BQHD[:, queries] = merge((out_BQHD[:, queries], lse_BQH[:, queries]), of_pose)[0].to(q_BQHE.dtype)
    posed = torch.cat(list(key_rows[1:]))
    if not len(posed):
        return torch.cat((out_BQHD, torch.zeros_like(pose_q_BQHD)), dim=-1)
    pose_out_BQHD = kernel.attend(pose_q_BQHD, pose_k_BKHD[:, posed], pose_v_BKHD[:, posed], None, scale)
    return torch.cat((out_BQHD, pose_out_BQHD), dim=-1)
