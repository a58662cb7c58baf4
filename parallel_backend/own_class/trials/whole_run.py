"""A run of the whole model, noted, to hold runs of ranks and bands against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnAttention, OwnBlock
from parallel_backend.own_class.calls.block_arguments import Arguments, tensor_places
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import AttentionCall, attention_call
from parallel_backend.own_class.cuts.band_tokens import ONE
from parallel_backend.own_class.cuts.token_cut import TokenCut


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


class WholeRun(TokenCut):
    """Cuts nothing, and notes a run."""

    def __init__(self, blocks: Sequence[OwnBlock]):
        super().__init__([replace(block, attention=()) for block in blocks], 0, ONE)
        self.shapes: list[list[torch.Size]] = []
        """Of each block's tensors."""
        self.calls: list[list[Noted]] = []
        """Each block's attention."""
        self.outputs: dict[int, tuple[torch.Tensor | None, ...]] = {}
        """Of each block, by number."""
        self.result: Any = None
        """Of the model."""

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self.number = number
        leaves = pytree.tree_leaves((args, kwargs))
        self.shapes.append([leaves[at].shape for at in tensor_places(leaves)])
        self.calls.append([])
        return args, kwargs

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._coming is None:
            return function(*args, **kwargs)
        call, out = attention_call(function, *args, **kwargs), function(*args, **kwargs)
        tensors = call.q_BQHD.clone(), call.k_BKHD.clone(), call.v_BKHD.clone()
        of_heads = out.transpose(1, 2) if call.heads_first else out.unflatten(-1, (call.q_BQHD.shape[2], -1))
        try:
            key_mask = call.key_mask
        except Unproven:
            key_mask = None  # said where the call is cut
        self.calls[-1].append(Noted(tensors, of_heads.clone(), call.mask is not None, key_mask))
        return out

    def leaves(self, number: int) -> bool:
        return True

    def leave(self, out: Any, is_known: bool = True) -> Any:
        values = (out,) if isinstance(out, torch.Tensor) else out
        self.outputs[self.number] = tuple(None if value is None else value.clone() for value in values)
        return out

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("nothing is cut")

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        raise AssertionError("nothing is cut")
