"""Ring attention: keys and values rotate over the ranks of the ring axis, partial results are merged by log-sum-exp."""

from collections.abc import Sequence

import torch

from parallel_backend.rank.comm.collectives import start_shift
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfers import Traffic

from .kernels.interface import AttendLse


def ring_attention(
    q_BsHD: torch.Tensor,
    k_BsHD: torch.Tensor,
    v_BsHD: torch.Tensor,
    lengths: Sequence[int],
    masks: Sequence[torch.Tensor | None],
    attend: AttendLse,
    scale: float | None,
    overlap: bool,
    axis: Axis,
    traffic: Traffic,
) -> torch.Tensor:
    """Ring attention (arXiv 2310.01889): queries [B, s, H, D] stay, keys and values of all S tokens come round.

    `lengths[j]`: tokens of rank j. `masks[j]`: [B, lengths[j]] bool, tokens that may be seen; None: all. With `overlap` the
    next block travels during attention to this one. Returns [B, s, H, D].
    """
    block = torch.stack((k_BsHD, v_BsHD))
    out = lse = None
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        shift = None
        if step < axis.size - 1:
            shift = start_shift(block, lengths[(source - 1) % axis.size], 2, axis, traffic)
            if not overlap:
                block_next = shift.wait()
        if lengths[source] and len(q_BsHD[0]):
            part = attend(q_BsHD, block[0], block[1], masks[source], scale)
            out, lse = part if out is None else merge((out, lse), part)
        if shift is not None:
            block = shift.wait() if overlap else block_next
    return q_BsHD.clone() if out is None else out.to(q_BsHD.dtype)


def merge(
    one: tuple[torch.Tensor, torch.Tensor], two: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys, each (out [B, q, H, D], log-sum-exp [B, q, H]). float32."""
    # Where neither has a key the difference is -inf + inf, and both outputs are zeros.
    weight = torch.sigmoid(two[1] - one[1]).nan_to_num_(0.0)[..., None]
    return torch.lerp(one[0].float(), two[0].float(), weight), torch.logaddexp(one[1], two[1])
