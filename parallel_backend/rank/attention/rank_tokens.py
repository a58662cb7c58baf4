"""Attention in blocks of ComfyUI's own class whose tokens are cut over sequence ranks, or into bands
(own_class/cuts/token_cut.py).

Ulysses' all-to-all, or ring attention, or both. Ulysses computes by the function that the class calls, with this rank's
heads; ring attention by the model's kernel, since it needs the log-sum-exp. Keys of bands and of displaced patches go
through the run's K/V buffer.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from parallel_backend.core.own_class import OwnAttention, OwnBlock
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span, split
from parallel_backend.own_class.calls.block_arguments import Arguments
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.token_cut import HOST, AttentionCall, TokenCut
from parallel_backend.rank.comm.collectives import start_gather
from parallel_backend.rank.comm.mesh import Axis

from .context import AttentionContext, AttentionStep
from .kv_buffer import KVBuffer, Piece
from .own_kernels import OwnKernels
from .patch_keys import exchange_patches
from .ring import ring_attention
from .ulysses import groups_of, head_groups, start_heads_to_sequence, start_sequence_to_heads
from .words import WordKeys


class RankTokens(TokenCut):
    """This rank's tokens, of those of `ranks`."""

    def __init__(self, blocks: Sequence[OwnBlock], context: AttentionContext, ranks: SequenceCut, kernels: OwnKernels):
        self._kernels = kernels
        self._context, self._patch = context, context.patch
        if context.naive:  # the patch's ranks alone: it sees no other one
            self._patch, ranks = replace(context.patch, index=0, size=1), SequenceCut((1.0,), ranks.inner, repeat_text=False)
        same_ring = context.ulysses_ranks(self._patch.index, context.ring.index)
        super().__init__(blocks, same_ring[context.ulysses.index], ranks)
        self.alone, self.attend_whole = context.naive, kernels.attend
        counts = [len(block.attention) for block in self.blocks]
        self._layers = list(itertools.accumulate(counts, initial=0))  # by block: number of its first call of attention
        self._attended = 0  # calls in the block that runs
        self._pieces: dict[tuple[tuple[int, ...], range], list[Piece]] = {}  # of this call, by streams and ranks

    @property
    def _buffer(self) -> KVBuffer | None:
        assert self._context.step is not None, "attention outside of a micro-step"
        return self._context.step.buffer

    @property
    def _words(self) -> WordKeys | None:
        assert self._context.step is not None, "attention outside of a micro-step"
        return self._context.step.words

    @property
    def _in_bands(self) -> bool:
        """Keys are in the order of the K/V buffer."""
        return self._buffer is not None or self._words is not None

    @property
    def cuts(self) -> bool:
        return self.alone or self.ranks.size > 1 or self._in_bands

    def begin(self) -> None:
        super().begin()
        self._pieces.clear()
        if not self._in_bands and not self.alone:
            self.band = None
        assert not (self._in_bands or self.alone) or self.band is not None, (
            "bands are refused where no trial has proven them"
        )
        if self.band is not None and self._context.step is not None:
            self.band = replace(self.band, words_have_run=self._context.step.words_have_run)

    def enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self._attended = 0
        return super().enter(number, args, kwargs)

    def attend(self, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        out = super().attend(function, *args, **kwargs)
        self._attended += 1
        return out

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        context, axis = self._context, self._context.ulysses
        queries, keys = self.lengths(spec.queries), self.lengths(spec.keys)
        gate = context.take_gate(call.q_BQHD)
        if axis.size == 1:
            all_heads = Span(0, call.q_BQHD.shape[2])
            return self._attend(spec, call, all_heads, call.q_BQHD, call.k_BKHD, call.v_BKHD, keys, mask_bK, gate)
        own = context.ulysses_ranks(self._patch.index, context.ring.index)
        of_queries, of_keys = queries[own.start : own.stop], keys[own.start : own.stop]
        heads, step = call.q_BQHD.shape[2], context.step
        in_one = step is None or not step.overlap or self._buffer is not None
        count = 1 if in_one else groups_of(call.q_BQHD, sum(of_queries), heads // axis.size)
        groups = head_groups(heads, axis.size, count)
        sent = (call.q_BQHD, call.k_BKHD, call.v_BKHD, *([] if gate is None else [gate]))
        tokens = (of_queries, of_keys, of_keys, of_queries)[: len(sent)]
        shared = axis, context.traffic, context.codec
        # All ranks issue the transfers of a layer in this order, as their group's communicator needs: the next group comes
        # in before this one's attention, which goes out behind it.
        ready = start_sequence_to_heads(sent, tokens, groups[0], *shared)
        out_BQHD, finishing = torch.empty_like(call.q_BQHD, memory_format=torch.contiguous_format), []
        for number, group in enumerate(groups, 1):
            q_BQhD, k_BKhD, v_BKhD, *gates = ready()
            if number < len(groups):
                ready = start_sequence_to_heads(sent, tokens, groups[number], *shared)
            out_BQhD = self._attend(spec, call, group[axis.index], q_BQhD, k_BKhD, v_BKhD, keys, mask_bK, *gates)
            finishing.append(start_heads_to_sequence(out_BQhD, out_BQHD, of_queries, group, *shared))
        for finish in finishing:
            finish()
        return out_BQHD

    def _attend(
        self,
        spec: OwnAttention,
        call: AttentionCall,
        heads: Span,
        q_BQhD: torch.Tensor,
        k_BKhD: torch.Tensor,
        v_BKhD: torch.Tensor,
        keys: Sequence[int],
        mask_bK: torch.Tensor | None,
        gate_BQhD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Over the keys of all ring ranks. `heads`: those of the call that the tensors have. `keys`: numbers of tokens by
        sequence rank. `gate_BQhD`: VSA's."""
        context, step = self._context, self._context.step
        assert step is not None, "attention outside of a micro-step"
        patch, ring = self._patch, context.ring

        def tokens(ranks: range) -> int:
            return sum(keys[rank] for rank in ranks)

        times = 1 if heads.start % spec.sharing or heads.stop % spec.sharing else spec.sharing
        if times > 1 and (self._in_bands or patch.size > 1 or ring.size > 1):  # less is sent and kept
            k_BKhD, v_BKhD = k_BKhD[:, :, ::times], v_BKhD[:, :, ::times]
        of_ring = [tokens(context.ulysses_ranks(patch.index, index)) for index in range(ring.size)]
        if not self._in_bands and patch.size == 1 and ring.size > 1 and call.rule is None:
            attend, masks = context.kernel.attend_lse, [None] * ring.size
            if mask_bK is not None:
                masks = list(mask_bK.expand(len(q_BQhD), -1).split(of_ring, dim=1))
            scale = call.arguments.get("scale")
            return ring_attention(q_BQhD, k_BKhD, v_BKhD, of_ring, masks, attend, scale, step.overlap, ring, context.traffic)
        if ring.size > 1:
            k_BKhD, v_BKhD = self._gathered_keys(k_BKhD, v_BKhD, of_ring, ring)
        if self._buffer is not None:
            k_BKhD, v_BKhD = self._buffered(spec, step, self._buffer, k_BKhD, v_BKhD, tokens)
            mask_bK = None if mask_bK is None else mask_bK[:, : k_BKhD.shape[1]]
        elif patch.size > 1:
            lengths = [tokens(context.patch_ranks(index)) for index in range(patch.size)]
            k_BKhD, v_BKhD = self._gathered_keys(k_BKhD, v_BKhD, lengths, patch)
        if self._words is not None and len(heads):
            k_BKhD, v_BKhD = self._with_words(self._words, spec, k_BKhD, v_BKhD, heads, call.q_BQHD.shape[2])
        if not q_BQhD.shape[1] or not q_BQhD.shape[2]:
            return torch.empty_like(q_BQhD)
        if (times := q_BQhD.shape[2] // k_BKhD.shape[2]) > 1:
            k_BKhD, v_BKhD = (x.repeat_interleave(times, dim=2) for x in (k_BKhD, v_BKhD))
        if call.rule is not None:
            numbers = self._query_numbers(spec.queries), self._key_numbers(spec.keys, k_BKhD.shape[1])
            return self._kernels.by_rows(call, q_BQhD, k_BKhD, v_BKhD, *numbers)
        places = functools.partial(self.all_rows, spec.queries, HOST)
        return self._kernels.compute(call, q_BQhD, k_BKhD, v_BKhD, mask_bK, spec.queries, places, gate_BQhD)

    def _query_numbers(self, streams: tuple[int, ...]) -> torch.Tensor:
        """[q] int64 in host memory: which of all tokens of these streams this rank's queries are, once Ulysses has gathered
        them."""
        ranks = self._context.ulysses_ranks(self._patch.index, self._context.ring.index)

        def make() -> torch.Tensor:
            return torch.cat([self.rows(streams, rank, HOST) for rank in ranks])

        return self._kernels.numbers(("queries", streams, self._of_call), make)

    def _key_numbers(self, streams: tuple[int, ...], known: int) -> torch.Tensor:
        """The same of the `known` keys, in the order in which they are attended to."""

        def make() -> torch.Tensor:
            if not self._in_bands or self.band is None:
                return self.all_rows(streams, HOST)
            return self.band.in_buffer(streams, self.tokens, HOST)[:known]

        return self._kernels.numbers(("keys", streams, known, self._of_call), make)

    @property
    def _of_call(self) -> Hashable:
        """What numbers of rows depend on, in calls with the same conditioning."""
        band = None if self.band is None else (self.band.band, self.band.has_words)
        return self._in_bands, tuple(self.tokens.items()), band

    def _gathered_keys(
        self, k_BKhD: torch.Tensor, v_BKhD: torch.Tensor, lengths: Sequence[int], axis: Axis
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = start_gather(torch.stack((k_BKhD, v_BKhD)), lengths, 2, axis, self._context.traffic).wait()
        k_BKhD, v_BKhD = torch.cat(both, dim=2)
        return k_BKhD, v_BKhD

    def _buffered(
        self,
        spec: OwnAttention,
        step: AttentionStep,
        buffer: KVBuffer,
        k_BKhD: torch.Tensor,
        v_BKhD: torch.Tensor,
        tokens: Callable[[range], int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values that are known, once those of all ranks are written to the buffer."""
        assert self.band is not None
        layer = self._layers[self.number] + self._attended
        words, has_latent = self.band.words(spec.keys, self.tokens), bool(set(self.band.latent.streams) & set(spec.keys))
        pieces_of = functools.partial(self._pieces_of, spec.keys)
        of_patches = exchange_patches(self._context, step, layer, k_BKhD, v_BKhD, tokens, pieces_of)
        k_BKhD, v_BKhD, pieces, arriving = of_patches
        known = buffer.update(layer, k_BKhD, v_BKhD, pieces, step.entries, words, has_latent)
        if arriving is not None:
            buffer.add_pending(layer, arriving)
        return known

    def _with_words(
        self,
        words: WordKeys,
        spec: OwnAttention,
        k_BKhD: torch.Tensor,
        v_BKhD: torch.Tensor,
        heads: Span,
        all_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of the call, in the order of the K/V buffer. `heads`: of the call's `all_heads`, those that
        the tensors have, once for each that shares them."""
        assert self.band is not None and self._context.step is not None
        axis, times = self._context.ulysses, len(heads) // k_BKhD.shape[2]
        own = split(Span(0, all_heads), axis.size)[axis.index]
        of_keys = Span((heads.start - own.start) // times, (heads.stop - own.start) // times)
        layer, count = self._layers[self.number] + self._attended, self.band.words(spec.keys, self.tokens)
        pieces = self._pieces_of(spec.keys, range(self.ranks.size))
        of_call = pieces, self._context.step.entries, count
        return words.update(layer, k_BKhD, v_BKhD, *of_call, of_keys, len(own) // times)

    def mask_of_all(self, mask_bK: torch.Tensor, streams: tuple[int, ...]) -> torch.Tensor:
        """In the order of the K/V buffer, in a run of bands: a mask of this band's keys is kept for the others."""
        buffer, band = self._buffer, self.band
        if not self._in_bands or band is None:
            return super().mask_of_all(mask_bK, streams)
        tokens = sum(self.tokens[stream] for stream in streams)
        if mask_bK.shape[1] == tokens:
            return mask_bK[:, band.in_buffer(streams, self.tokens, mask_bK.device)]
        if buffer is None or mask_bK.shape[1] != self.lengths(streams)[self.index]:
            raise Unproven(f"{self.block.name} attends with a mask of other keys than in the trial")
        assert self._context.step is not None
        of_ranks = self.gather(mask_bK.to(torch.uint8)[..., None], streams)[..., 0].bool()
        layer, entries = self._layers[self.number] + self._attended, self._context.step.entries
        if layer not in buffer.masks:
            buffer.masks[layer] = of_ranks.new_ones(buffer.batch, tokens)
        kept = buffer.masks[layer][entries.slice]
        for rows, positions in self._pieces_of(streams, range(self.ranks.size)):
            kept[:, positions.slice] = of_ranks[:, rows.slice]
        return kept

    def _pieces_of(self, streams: tuple[int, ...], ranks: range) -> list[Piece]:
        """See BandTokens.pieces."""
        assert self.band is not None
        key = streams, ranks
        if key not in self._pieces:
            self._pieces[key] = self.band.pieces(streams, self.tokens, self.ranks, ranks)
        return self._pieces[key]

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        context, lengths = self._context, self.lengths(streams)
        patch, ring = self._patch, context.ring
        of_ring = [context.ulysses_ranks(patch.index, index) for index in range(ring.size)]
        of_patch = [context.patch_ranks(index) for index in range(patch.size)]
        of_ulysses = [range(rank, rank + 1) for rank in of_ring[ring.index]]
        for axis, ranks in ((context.ulysses, of_ulysses), (ring, of_ring), (patch, of_patch)):
            if axis.size > 1:
                parts = [sum(lengths[rank] for rank in of_part) for of_part in ranks]
                value = torch.cat(start_gather(value, parts, 1, axis, context.traffic).wait(), dim=1)
        return value
