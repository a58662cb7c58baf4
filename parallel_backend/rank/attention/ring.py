"""Ring attention: keys and values rotate over the ranks of the ring axis, partial results are merged by log-sum-exp."""

import torch

from parallel_backend.rank.comm.collectives import start_shift

from .context import AttentionContext, Form, LayerCall
from .gathered import of_axis

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over a set of keys, [B, Q, H, D], and its log-sum-exp [B, Q, H]."""


class Ring:
    """Ring attention (arXiv 2310.01889): each rank keeps its queries, and keys and values move from rank to rank.

    The user's kernel computes each part with its log-sum-exp. `gathered` takes calls with an attention rule, because a rule
    needs all keys at once.
    """

    def __init__(self, gathered: Form, context: AttentionContext):
        self._gathered, self._ranks = gathered, context.of_ring
        self._axis, self._traffic = context.ring, context.traffic

    def attend(self, at: LayerCall, q_BsHD: torch.Tensor, k_BsHD: torch.Tensor, v_BsHD: torch.Tensor) -> torch.Tensor:
        if at.call.rule is not None:
            return self._gathered.attend(at, q_BsHD, k_BsHD, v_BsHD)
        axis, overlap = self._axis, at.step.message.overlap
        attend, scale = at.step.kernel.attend_lse, at.call.arguments.get("scale")
        lengths = of_axis(at.keys, self._ranks)
        masks = [None] * axis.size if at.mask_bK is None else at.mask_bK.expand(len(q_BsHD), -1).split(lengths, dim=1)
        masked = at.mask_bK is not None
        block_2BsHD = torch.stack((k_BsHD, v_BsHD))
        found: Part | None = None
        for step in range(axis.size):
            source = (axis.index - step) % axis.size
            shift = None
            if step < axis.size - 1:
                # May be in progress during attention: both only read the block, and the next block has other memory.
                shift = start_shift(block_2BsHD, lengths[(source - 1) % axis.size], 2, axis, self._traffic)
                if not overlap:
                    next_2BsHD = shift.wait()
            if lengths[source] and q_BsHD.shape[1]:
                k_BsHD, v_BsHD = block_2BsHD.unbind()
                part = attend(q_BsHD, k_BsHD, v_BsHD, masks[source], scale)
                if found is not None:  # the last log-sum-exp is not read
                    part = merge(found, part, masked) if shift is not None else (mix(found, part, masked), part[1])
                found = part
            if shift is not None:
                block_2BsHD = shift.wait() if overlap else next_2BsHD
        return q_BsHD.clone() if found is None else found[0].type_as(q_BsHD)


def merge(one: Part, two: Part, masked: bool) -> Part:
    """Merge attention over two sets of keys. Returns the same in float32. `masked`: a set may have no key that a query
    sees."""
    return mix(one, two, masked), torch.logaddexp(one[1], two[1])


def mix(one: Part, two: Part, masked: bool) -> torch.Tensor:
    """Return the merged output of two sets of keys, without the log-sum-exp."""
    # A set's weight is exp(lse) over the sum of both, which is a sigmoid of the difference: neither exponential overflows.
    weight_BQH = (two[1] - one[1]).sigmoid_()
    if masked:  # if neither set has a key, the difference is -inf + inf, and both outputs are zeros
        weight_BQH.nan_to_num_(0.0)
    # float32, since a bf16 sum would be rounded again with every block of the ring.
    return torch.lerp(one[0].float(), two[0].float(), weight_BQH.unsqueeze(-1))
