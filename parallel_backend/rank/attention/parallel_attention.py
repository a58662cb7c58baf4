"""Parallel attention. diffusers' attention dispatcher calls the `ParallelAttention` of a layer's processor.

Order: Ulysses' all-to-all in; keys and values of other ring and patch ranks, or ring attention; the K/V buffer; the
attention kernel; Ulysses' all-to-all out. Queries and keys are normalised and have rotary embedding applied.
"""

from dataclasses import dataclass

import torch

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import CAUSAL_TEXT, JOINT, PAIRED, WINDOWS
from parallel_backend.families.models.normalized_guidance import normalized
from parallel_backend.rank.comm.collectives import all_reduce, start_gather
from parallel_backend.rank.comm.mesh import Axis

from .context import AttentionContext, AttentionStep
from .kv_buffer import Piece
from .paired_attention import paired_attention
from .patch_keys import exchange_patches
from .ring import ring_attention
from .ulysses import groups_of, head_groups, start_heads_to_sequence, start_sequence_to_heads
from .windowed_attention import windowed_attention


@dataclass(frozen=True)
class ParallelAttention:
    """A layer's parallel attention, kept in its processor's `_parallel_config`."""

    context: AttentionContext
    layer: int
    """Number of the layer within the stage, its key in the K/V buffer."""
    over: str = JOINT
    """Tokens that the layer mixes, see `BlockList.attention`."""
    head_size: int = 0
    """Channels of one stream's head. 0 where `over` is not PAIRED."""
    block: str = ""
    """The layer's block, "<list>.<index>"."""

    def attend(
        self,
        q_BQHD: torch.Tensor,
        k_BKHD: torch.Tensor,
        v_BKHD: torch.Tensor,
        scale: float | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries of this rank's tokens attend to keys of all tokens, or of all in the stream that the layer looks at.

        Returns [B, Q, H, D]. Masks come with the micro-step: the model's own `mask` covers this rank's keys only.
        """
        step = self.context.step
        assert step is not None, "attention outside of a micro-step"
        assert mask is None, "this family's own forward passes an attention mask"
        if self.over == CAUSAL_TEXT:
            return self._attend_causal(step, q_BQHD, k_BKHD, v_BKHD, scale)
        out_BQHD = self._attend(step.over(self.over), q_BQHD, k_BKHD, v_BKHD, scale)
        if step.guidance is None or self.over != JOINT:
            return out_BQHD
        return self._guided(step, step.guidance, out_BQHD)

    def _attend_causal(self, step: AttentionStep, q_BQHD, k_BKHD, v_BKHD, scale) -> torch.Tensor:
        """As `attend`, for CAUSAL_TEXT: the text's tokens attend to the text, then the image's to all."""
        context = self.context
        if not any(len(text) for text in step.text):  # alike on all ranks, as the transfers need
            return self._attend(step.over(CAUSAL_TEXT), q_BQHD, k_BKHD, v_BKHD, scale)
        place = context.ulysses_ranks(context.patch.index, context.ring.index)[context.ulysses.index]
        words = len(step.text[place])
        text, image = (
            [x_BsHD[:, rows] for x_BsHD in (q_BQHD, k_BKHD, v_BKHD)] for rows in (slice(words), slice(words, None))
        )
        of_text = self._attend(step.causal_text, text[0], text[1], text[2], scale)
        of_image = self._attend(step.over(CAUSAL_TEXT), image[0], image[1], image[2], scale)
        return torch.cat((of_text, of_image), dim=1)

    def _attend(self, step: AttentionStep, q_BQHD, k_BKHD, v_BKHD, scale) -> torch.Tensor:
        """As `attend`, without guidance."""
        context = self.context
        if not step.runs:
            return torch.empty_like(q_BQHD)
        axis, heads = context.ulysses, q_BQHD.shape[2]
        ranks = context.ulysses_ranks(context.patch.index, context.ring.index)
        lengths = [step.lengths[rank] for rank in ranks]
        attend = self._attend_fresh if step.buffer is None else self._attend_buffered
        if axis.size == 1:
            return attend(step, q_BQHD, k_BKHD, v_BKHD, scale, Span(0, heads))
        groups = head_groups(heads, axis.size, self._groups(step, q_BQHD, heads // axis.size))
        shared = (axis, context.traffic, context.codec)
        early, context.early_values = context.early_values, None
        sent = [q_BQHD, k_BKHD, *([v_BKHD] if early is None else [])]
        tokens = [lengths] * len(sent)
        # All ranks issue the transfers of a layer in this order, as their group's communicator needs: the first group in,
        # then for each group the next one in before this one's attention, and its output out behind it.
        ready = start_sequence_to_heads(sent, tokens, groups[0], *shared)
        values_BKhD = None if early is None else early()
        out_BQHD, finishing = torch.empty_like(q_BQHD, memory_format=torch.contiguous_format), []
        for number, group in enumerate(groups, 1):
            received, span = list(ready()), group[axis.index]
            if values_BKhD is not None:  # of all groups' heads, since the early transfer is not cut into groups
                received.append(values_BKhD[:, :, span.shift(-groups[0][axis.index].start).slice])
            if number < len(groups):
                ready = start_sequence_to_heads(sent, tokens, groups[number], *shared)
            q_BQhD, k_BKhD, v_BKhD = received
            out_BQhD = attend(step, q_BQhD, k_BKhD, v_BKhD, scale, span)
            finishing.append(start_heads_to_sequence(out_BQhD, out_BQHD, lengths, group, *shared))
        for finish in finishing:
            finish()
        return out_BQHD

    def _guided(self, step: AttentionStep, guidance: NormalizedGuidance, out_BQHD: torch.Tensor) -> torch.Tensor:
        """Guides the image's tokens of `out_BQHD`, in place. See NormalizedGuidance."""
        context = self.context
        positive, negative = guidance.positive.slice, guidance.negative.slice
        place = context.ulysses_ranks(context.patch.index, context.ring.index)[context.ulysses.index]
        tokens = len(step.image[place])
        image = out_BQHD[:, out_BQHD.shape[1] - tokens :] if step.text_first else out_BQHD[:, :tokens]
        # A token's norm is over the channels of all heads, which tensor ranks share.
        add_up = (lambda sums: all_reduce(sums, context.tensor, context.traffic)) if context.tensor.size > 1 else lambda x: x
        settings = guidance.scale, guidance.tau, guidance.alpha
        image[positive] = image[negative] = normalized(image[positive], image[negative], *settings, add_up)
        return out_BQHD

    def _groups(self, step: AttentionStep, q_BQHD: torch.Tensor, heads: int) -> int:
        """Number of groups of a rank's `heads`."""
        whole = not step.overlap or step.buffer is not None or step.causal
        return 1 if whole else groups_of(q_BQHD, sum(step.lengths), heads)

    def _attend_fresh(
        self, step: AttentionStep, q_BQhD, k_BKhD, v_BKhD, scale, heads: Span, gate_BShD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention over keys and values of this call only. `heads`: those of the layer that the tensors have. `gate_BShD`:
        see SparseStep.attend."""
        context = self.context
        patch, ring = context.patch, context.ring
        patches = [patch.index] if context.naive else list(range(patch.size))
        # By ring rank: the sequence ranks whose keys the ring rank has after the gather over patches.
        ranges = [[context.ulysses_ranks(p, r) for p in patches] for r in range(ring.size)]
        if len(patches) > 1:
            lengths = [step.tokens(ranks) for ranks in ranges[ring.index]]
            k_BKhD, v_BKhD = self._gather(k_BKhD, v_BKhD, lengths, patch)
        lengths = [sum(step.tokens(ranks) for ranks in of_ring) for of_ring in ranges]
        if step.causal:
            if ring.size > 1:  # every rank keeps the whole text's keys, so that later calls do not rotate them
                k_BKhD, v_BKhD = self._gather(k_BKhD, v_BKhD, lengths, ring)
            assert step.prefix is not None
            k_BThD, v_BThD = _in_order(step, [ranks for of_ring in ranges for ranks in of_ring], k_BKhD, v_BKhD)
            step.prefix.put(self.layer, k_BThD, v_BThD, step.entries, heads.start)
            return self._attend_text(step, q_BQhD, k_BThD, v_BThD, scale)
        # Only behind the gather, which is collective: a rank without queries still sends its keys.
        if not q_BQhD.shape[1] and ring.size == 1:
            return torch.empty_like(q_BQhD)
        if self._is_paired(q_BQhD):
            if ring.size > 1:  # keys of one frame are on all ring ranks
                k_BKhD, v_BKhD = self._gather(k_BKhD, v_BKhD, lengths, ring)
            spans = tuple(step.image[rank] for of_ring in ranges for ranks in of_ring for rank in ranks)
            return self._attend_paired(step, q_BQhD, k_BKhD, v_BKhD, spans, scale)
        if self.over == WINDOWS:
            if ring.size > 1:  # a window's keys are on several ring ranks, and those of the text on all
                k_BKhD, v_BKhD = self._gather(k_BKhD, v_BKhD, lengths, ring)
            keys = step.pieces_of([ranks for of_ring in ranges for ranks in of_ring])
            return self._attend_windows(step, q_BQhD, k_BKhD, v_BKhD, keys, scale)
        if self.over == CAUSAL_TEXT and ring.size == 1:
            k_BKhD, v_BKhD = self._behind_text(step, k_BKhD, v_BKhD, heads)
        if ring.size == 1:
            return context.kernel.attend(q_BQhD, k_BKhD, v_BKhD, None, scale)
        attend, held = context.kernel.attend_lse, None
        if self.over == CAUSAL_TEXT and q_BQhD.shape[1]:
            held = attend(q_BQhD, *self._text_keys(step, heads), None, scale)
        masks = [None] * ring.size
        return ring_attention(
            q_BQhD, k_BKhD, v_BKhD, lengths, masks, attend, scale, step.overlap, ring, context.traffic, held
        )

    def _attend_buffered(self, step: AttentionStep, q_BQhD, k_BKhD, v_BKhD, scale, heads: Span) -> torch.Tensor:
        """Attention over the K/V buffer, after fresh keys and values are written to it. `heads`: see _attend_fresh."""
        context, buffer = self.context, step.buffer
        assert buffer is not None
        patch, ring = context.patch, context.ring
        if ring.size > 1:
            # Gathered and not rotated: to rotate the whole buffer for each of M bands would move M times as much. Every ring
            # rank has a whole buffer instead.
            lengths = [step.tokens(context.ulysses_ranks(patch.index, index)) for index in range(ring.size)]
            k_BKhD, v_BKhD = self._gather(k_BKhD, v_BKhD, lengths, ring)
        k_BKhD, v_BKhD, pieces_of_ranks, arriving = exchange_patches(
            context, step, self.layer, k_BKhD, v_BKhD, step.tokens, step.pieces
        )
        if self.over == CAUSAL_TEXT and step.prefix is not None and self.layer in step.prefix.layers:
            # The text has run in this micro-step: the buffer takes its keys, and has them for the rest of the run.
            k_BKhD, v_BKhD = self._behind_text(step, k_BKhD, v_BKhD, heads)
            del step.prefix.layers[self.layer]
            text = Span(0, step.text_tokens)
            pieces_of_ranks = [(text, text), *((rows.shift(len(text)), at) for rows, at in pieces_of_ranks)]
        k_BKhD, v_BKhD = buffer.update(self.layer, k_BKhD, v_BKhD, pieces_of_ranks, step.entries, step.text_tokens)
        if arriving is not None:
            # Behind `update`, which waits for all that is pending: this call's transfer is for the next call.
            buffer.add_pending(self.layer, arriving)
        if not q_BQhD.shape[1]:
            return torch.empty_like(q_BQhD)
        if self._is_paired(q_BQhD):
            return self._attend_paired(step, q_BQhD, k_BKhD, v_BKhD, (Span(0, k_BKhD.shape[1]),), scale)
        if self.over == WINDOWS:
            keys = [Span(0, step.text_tokens), Span(step.text_tokens, k_BKhD.shape[1])]
            return self._attend_windows(step, q_BQhD, k_BKhD, v_BKhD, [(span, span) for span in keys], scale)
        return context.kernel.attend(q_BQhD, k_BKhD, v_BKhD, None, scale)

    def _attend_text(self, step: AttentionStep, q_BQhD, k_BThD, v_BThD, scale) -> torch.Tensor:
        """Text tokens attend to the whole text up to their ends."""
        context, out_BQhD = self.context, torch.empty_like(q_BQhD)
        assert step.text_ends_T is not None, "a layer over CAUSAL_TEXT needs TEXT_ENDS"
        for rows, positions, run in step.text_pieces(context.ulysses_ranks(context.patch.index, context.ring.index)):
            q_BrhD, k_BShD, v_BShD = q_BQhD[:, rows.slice], k_BThD[:, : run.sees], v_BThD[:, : run.sees]
            if run.alike:
                out_BQhD[:, rows.slice] = context.kernel.attend(q_BrhD, k_BShD, v_BShD, None, scale)
            else:
                seen_rS = torch.arange(run.sees, device=q_BQhD.device) < step.text_ends_T[positions.slice, None]
                out_BQhD[:, rows.slice] = context.kernel.attend_rows(q_BrhD, k_BShD, v_BShD, seen_rS, scale)
        return out_BQhD

    def _text_keys(self, step: AttentionStep, heads: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole text, of heads `heads` of the layer."""
        assert step.prefix is not None
        return step.prefix.of(self.layer, step.entries, heads)

    def _behind_text(self, step: AttentionStep, k_BKhD, v_BKhD, heads: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole text, then these."""
        k_BThD, v_BThD = self._text_keys(step, heads)
        return torch.cat((k_BThD, k_BKhD), dim=1), torch.cat((v_BThD, v_BKhD), dim=1)

    def _is_paired(self, q_BQhD: torch.Tensor) -> bool:
        return self.over == PAIRED and q_BQhD.shape[-1] > self.head_size

    def _attend_paired(self, step: AttentionStep, q_BQhE, k_BKhE, v_BKhE, spans: tuple[Span, ...], scale) -> torch.Tensor:
        """`spans`: image tokens that the keys are of, in order."""
        context = self.context
        assert step.frames is not None
        queries = tuple(step.image[rank] for rank in context.ulysses_ranks(context.patch.index, context.ring.index))
        rows = step.frames.of(queries), step.frames.of(spans)
        return paired_attention(context.kernel, q_BQhE, k_BKhE, v_BKhE, *rows, scale)

    def _attend_windows(self, step: AttentionStep, q_BQhD, k_BKhD, v_BKhD, keys: list[Piece], scale) -> torch.Tensor:
        """`keys`: what the rows of keys are."""
        context = self.context
        windows = step.windows[int(self.block.rpartition(".")[2]) % len(step.windows)]
        queries = step.pieces(context.ulysses_ranks(context.patch.index, context.ring.index))
        of_queries, of_keys = (windows.with_text(pieces, step.text_tokens) for pieces in (queries, keys))
        return windowed_attention(context.kernel, q_BQhD, k_BKhD, v_BKhD, of_queries, of_keys, scale)

    def _gather(self, k_BshD, v_BshD, lengths: list[int], axis: Axis) -> list[torch.Tensor]:
        """Keys and values of all ranks of `axis`, which have `lengths` tokens each."""
        gathering = start_gather(torch.stack((k_BshD, v_BshD)), lengths, 2, axis, self.context.traffic)
        return list(torch.cat(gathering.wait(), dim=2))


def _in_order(step: AttentionStep, ranges: list[range], *x_BKhD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors whose tokens are those of `ranges`, one behind the other -> the same in the order of the sequence."""
    pieces = step.pieces_of(ranges)
    ordered = sorted(pieces, key=lambda piece: piece[1].start)
    if ordered == pieces:
        return x_BKhD
    return tuple(torch.cat([x[:, rows.slice] for rows, _ in ordered], dim=1) for x in x_BKhD)
