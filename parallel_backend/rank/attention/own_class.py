"""Attention in blocks of ComfyUI's own class whose tokens are cut over sequence ranks (families/own_class/token_cut.py).

Ulysses' all-to-all, or ring attention, or both. Ulysses computes by the function that the class calls, with this rank's
heads; ring attention by the model's kernel, since it needs the log-sum-exp.
"""

from collections.abc import Sequence

import torch

from parallel_backend.core.own_class import OwnAttention, OwnBlock
from parallel_backend.core.spans import Span, split
from parallel_backend.families.own_class.token_cut import AttentionCall, TokenCut
from parallel_backend.rank.comm.collectives import start_gather

from .context import AttentionContext
from .ring import ring_attention
from .ulysses import start_heads_to_sequence, start_sequence_to_heads


class RankTokens(TokenCut):
    """This rank's tokens, over the ranks of `context`'s ring and Ulysses axes: ring the outer one."""

    def __init__(self, blocks: Sequence[OwnBlock], context: AttentionContext):
        ring, ulysses = context.ring, context.ulysses
        super().__init__(blocks, ring.index * ulysses.size + ulysses.index, ring.size * ulysses.size)
        self._context = context

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        context, axis = self._context, self._context.ulysses
        queries, keys = self.lengths(spec.queries), self.lengths(spec.keys)
        if axis.size == 1:
            return self._attend(call, call.q_BQHD, call.k_BKHD, call.v_BKHD, keys, mask_bK)
        own = context.ulysses_ranks(0, context.ring.index)
        of_queries, of_keys = queries[own.start : own.stop], keys[own.start : own.stop]
        heads = split(Span(0, call.q_BQHD.shape[2]), axis.size)
        sent = call.q_BQHD, call.k_BKHD, call.v_BKHD
        shared = axis, context.traffic, context.codec
        q_BQhD, k_BKhD, v_BKhD = start_sequence_to_heads(sent, (of_queries, of_keys, of_keys), heads, *shared)()
        out_BQhD = self._attend(call, q_BQhD, k_BKhD, v_BKhD, keys, mask_bK)
        out_BQHD = torch.empty_like(call.q_BQHD, memory_format=torch.contiguous_format)
        start_heads_to_sequence(out_BQhD, out_BQHD, of_queries, heads, *shared)()
        return out_BQHD

    def _attend(
        self, call: AttentionCall, q_BQhD, k_BKhD, v_BKhD, keys: Sequence[int], mask_bK: torch.Tensor | None
    ) -> torch.Tensor:
        """Over the keys of all ring ranks. `keys`: numbers of tokens by sequence rank."""
        context, ring = self._context, self._context.ring
        if ring.size == 1:
            has_any = q_BQhD.shape[1] and q_BQhD.shape[2]
            return call.compute(q_BQhD, k_BKhD, v_BKhD, mask_bK) if has_any else torch.empty_like(q_BQhD)
        step = context.step
        assert step is not None, "attention outside of a micro-step"
        of_ring = [sum(keys[rank] for rank in context.ulysses_ranks(0, index)) for index in range(ring.size)]
        attend, masks = context.kernel.attend_lse, [None] * ring.size
        if mask_bK is not None:
            masks = list(mask_bK.expand(len(q_BQhD), -1).split(of_ring, dim=1))
        scale = call.arguments.get("scale")
        return ring_attention(q_BQhD, k_BKhD, v_BKhD, of_ring, masks, attend, scale, step.overlap, ring, context.traffic)

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        context, lengths = self._context, self.lengths(streams)
        ring, ulysses = context.ring, context.ulysses
        own = context.ulysses_ranks(0, ring.index)
        if ulysses.size > 1:
            parts = start_gather(value, lengths[own.start : own.stop], 1, ulysses, context.traffic).wait()
            value = torch.cat(parts, dim=1)
        if ring.size > 1:
            of_ring = [sum(lengths[rank] for rank in context.ulysses_ranks(0, index)) for index in range(ring.size)]
            value = torch.cat(start_gather(value, of_ring, 1, ring, context.traffic).wait(), dim=1)
        return value
