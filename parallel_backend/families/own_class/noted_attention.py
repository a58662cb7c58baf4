"""A call of attention as a trial has noted it in the whole model, to hold those of ranks against."""

from dataclasses import dataclass, replace

import torch

from .attention_calls import AttentionCall


@dataclass(frozen=True)
class Noted:
    """A call of attention in the whole model: (queries, keys, values) and the output, each [B, S, H, D]."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    masked: bool
    key_mask: torch.Tensor | None
    """As AttentionCall has it. None, too, where its mask is not one of keys."""

    def of_tensor_rank(self, rank: int, call: AttentionCall) -> "Noted":
        """With the heads of a tensor rank, whose `call` this is."""

        def part(whole_BSHD: torch.Tensor, own_BSHD: torch.Tensor) -> torch.Tensor:
            heads = own_BSHD.shape[2]
            return whole_BSHD if heads == whole_BSHD.shape[2] else whole_BSHD[:, :, rank * heads : (rank + 1) * heads]

        q, k, v = self.tensors
        parts = part(q, call.q_BQHD), part(k, call.k_BKHD), part(v, call.v_BKHD)
        return replace(self, tensors=parts, out=part(self.out, call.q_BQHD))
