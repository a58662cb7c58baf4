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
    """Ring attention (arXiv 2310.01889): queries stay, keys and values of all S tokens rotate. Returns [B, s, H, D].

    `lengths[j]`: tokens of rank j. `masks[j]`: [B, lengths[j]] bool, tokens that may be seen; None: all. With `overlap` the
    next block travels during attention to the present one.
    """
    block_2BsHD = torch.stack((k_BsHD, v_BsHD))
    found: tuple[torch.Tensor, torch.Tensor] | None = None
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        shift = None
        if step < axis.size - 1:
            # May be under way during attention: both only read the block, and the next block has other memory.
            shift = start_shift(block_2BsHD, lengths[(source - 1) % axis.size], 2, axis, traffic)
            if not overlap:
                next_2BsHD = shift.wait()
        if lengths[source] and len(q_BsHD[0]):
            part = attend(q_BsHD, block_2BsHD[0], block_2BsHD[1], masks[source], scale)
            found = part if found is None else merge(found, part)
        if shift is not None:
            block_2BsHD = shift.wait() if overlap else next_2BsHD
    return q_BsHD.clone() if found is None else found[0].to(q_BsHD.dtype)


def merge(
    one: tuple[torch.Tensor, torch.Tensor], two: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys, each (out [B, Q, H, D], log-sum-exp [B, Q, H]), to the same in float32."""
    # A set's weight is exp(lse) over the sum of both, which is a sigmoid of the difference: neither exponential overflows.
    # Where neither set has a key the difference is -inf + inf, and both outputs are zeros.
    weight_BQH1 = torch.sigmoid(two[1] - one[1]).nan_to_num_(0.0)[..., None]
    # float32, since a bf16 sum would be rounded again with every block of the ring.
    return torch.lerp(one[0].float(), two[0].float(), weight_BQH1), torch.logaddexp(one[1], two[1])
