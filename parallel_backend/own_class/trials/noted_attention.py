"""A call of attention as a trial has noted it in the whole model, to hold those of ranks against."""

from dataclasses import dataclass, replace

import torch

from parallel_backend.own_class.cuts.attention_calls import AttentionCall


@dataclass(frozen=True)
class TensorRank:
    """One of `count` tensor ranks."""

    index: int
    count: int


@dataclass(frozen=True)
class Noted:
    """A call of attention in the whole model: (queries, keys, values) and the output, each [B, S, H, D]."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    masked: bool
    key_mask: torch.Tensor | None
    """As AttentionCall has it. None, too, where its mask is not one of keys."""

    def of_tensor_rank(self, rank: TensorRank, call: AttentionCall) -> "Noted":
        """With the heads of a tensor rank, whose `call` this is."""

        def part(whole_BSHD: torch.Tensor, own_BSHD: torch.Tensor) -> torch.Tensor:
            whole, heads = whole_BSHD.shape[2], own_BSHD.shape[2]
            if heads == whole:
                return whole_BSHD
            # Ranks with more heads come first: as many as this one has before it, or behind it if it has fewer.
            behind = (rank.count - 1 - rank.index) * heads
            start = rank.index * heads if heads * rank.count >= whole else whole - behind - heads
            return whole_BSHD[:, :, start : start + heads]

        q, k, v = self.tensors
        parts = part(q, call.q_BQHD), part(k, call.k_BKHD), part(v, call.v_BKHD)
        return replace(self, tensors=parts, out=part(self.out, call.q_BQHD))
