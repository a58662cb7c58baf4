"""Parallel attention. diffusers' attention dispatcher calls the `ParallelAttention` that a layer's processor has.

Order: Ulysses' all-to-all in; keys and values of other ring and patch ranks, or ring attention; the K/V buffer; the
attention kernel; Ulysses' all-to-all out. Queries and keys [B, s, H, D] are normalised and have rotary embedding applied.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import JOINT, PAIRED
from parallel_backend.families.models.normalized_guidance import normalized
from parallel_backend.rank.comm.change_codec import ChangeGathering, Held
from parallel_backend.rank.comm.collectives import Gathering, all_reduce, start_gather

from .context import AttentionContext, AttentionStep
from .kv_buffer import Arriving
from .paired_attention import paired_attention
from .ring import ring_attention
from .sdpa_redirect import SdpaProcessor
from .ulysses import head_groups, start_heads_to_sequence, start_sequence_to_heads

HEAD_GROUPS = {"cuda": 2, "cpu": 1}
"""Head groups per Ulysses rank, by device. One group's all-to-all overlaps another group's attention.

On a CPU nothing is gained: its cores carry the transfers themselves (docs/performance.md).
"""

LEAST_WORK = 1 << 14
"""Batch entries x query tokens x heads of a head group, at least. Fills a large GPU: 128 multiprocessors, tiles of 128."""


@dataclass(frozen=True)
class ParallelAttention:
    """A layer's parallel attention, kept in its processor's `_parallel_config`."""

    context: AttentionContext
    """Has the micro-step under way."""
    layer: int
    """Number of the layer within the stage, by which the K/V buffer knows it."""
    over: str = JOINT
    """Tokens that the layer mixes, see `BlockList.attention`."""
    head_size: int = 0
    """Channels of one stream's head. Only where `over` is PAIRED."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries [B, q, H, D], keys and values [B, k, H, D] of the rank's tokens -> [B, q, H, D]: attention over all keys.

        Those of the whole sequence, or of the stream that the layer looks at.

        Masks come with the micro-step: the model's own `mask` covers this rank's keys only.
        """
        step = self.context.step
        assert step is not None, "attention outside of a micro-step"
        assert mask is None or self.context.drops_mask, "this family's own forward passes an attention mask"
        out = self._attend(step.over(self.over), query, key, value, scale)
        return out if step.guidance is None or self.over != JOINT else self._guided(step, out)

    def _attend(self, step: AttentionStep, query, key, value, scale) -> torch.Tensor:
        """As `attend`, without guidance."""
        context = self.context
        if not step.runs:
            return torch.empty_like(query)
        axis, heads = context.ulysses, query.shape[2]
        ranks = context.ulysses_ranks(context.patch.index, context.ring.index)
        lengths = [step.query_lengths[rank] for rank in ranks]
        if (surplus := query.shape[1] - lengths[axis.index]) > 0:  # the token in the place of no text (BlockList.needs_text)
            sides = (surplus, 0) if step.text_first else (0, surplus)
            kept = slice(sides[0], query.shape[1] - sides[1])
            return F.pad(self._attend(step, *(x[:, kept] for x in (query, key, value)), scale), (0, 0, 0, 0, *sides))
        attend = self._attend_fresh if step.buffer is None else self._attend_buffered
        if axis.size == 1:
            return attend(step, query, key, value, scale, Span(0, heads))
        groups = head_groups(heads, axis.size, self._groups(step, query))
        shared = (axis, context.traffic, context.codec)
        keys = [step.lengths[rank] for rank in ranks]
        early, context.early_values = context.early_values, None
        travelling = (query, key, value) if early is None else (query, key)
        tokens = (lengths, keys, keys)[: len(travelling)]
        ready = start_sequence_to_heads(travelling, tokens, groups[0], *shared)
        values = None if early is None else early()
        out, finishing = torch.empty_like(query, memory_format=torch.contiguous_format), []
        for number, group in enumerate(groups, 1):
            own, here = ready(), group[axis.index]
            if values is not None:
                own = (*own, values[:, :, here.shift(-groups[0][axis.index].start).slice])
            if number < len(groups):
                ready = start_sequence_to_heads(travelling, tokens, groups[number], *shared)
            finishing.append(start_heads_to_sequence(attend(step, *own, scale, here), out, lengths, group, *shared))
        for finish in finishing:
            finish()
        return out

    def _guided(self, step: AttentionStep, out: torch.Tensor) -> torch.Tensor:
        """Guides the image's tokens of `out` [B, q, H, D], in place. See NormalizedGuidance."""
        context, guidance = self.context, step.guidance
        positive, negative = guidance.positive.slice, guidance.negative.slice
        place = context.ulysses_ranks(context.patch.index, context.ring.index)[context.ulysses.index]
        tokens = len(step.image[place])
        image = out[:, out.shape[1] - tokens :] if step.text_first else out[:, :tokens]
        add_up = (lambda sums: all_reduce(sums, context.tensor, context.traffic)) if context.tensor.size > 1 else lambda x: x
        settings = guidance.scale, guidance.tau, guidance.alpha
        image[positive] = image[negative] = normalized(image[positive], image[negative], *settings, add_up)
        return out

    def _groups(self, step: AttentionStep, query: torch.Tensor) -> int:
        """Number of head groups, see HEAD_GROUPS."""
        heads = query.shape[2] // self.context.ulysses.size
        groups = HEAD_GROUPS[query.device.type]
        work = len(query) * sum(step.lengths) * (heads // groups)
        whole = not step.overlap or step.buffer is not None or heads < groups
        return 1 if whole or (query.is_cuda and work < LEAST_WORK) else groups

    def _once(self, heads: Span, *repeated: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values [B, k, h, D] of the query heads `heads`, once for those that share them.

        As given where some of the heads that share one are on another rank.
        """
        sharing = self.context.sharing
        return repeated if heads.start % sharing or heads.stop % sharing else tuple(x[:, :, ::sharing] for x in repeated)

    def _attend_fresh(self, step: AttentionStep, query, key, value, scale, heads: Span) -> torch.Tensor:
        """Attention over keys and values of this call only. `heads`: those that q, k and v have, of the layer's."""
        context = self.context
        patch, ring = context.patch, context.ring
        patches = [patch.index] if context.naive else list(range(patch.size))
        # By ring rank: sequence ranks whose keys it holds after the gather over patches.
        holds = [[context.ulysses_ranks(p, r) for p in patches] for r in range(ring.size)]
        if len(patches) > 1 or ring.size > 1:
            key, value = self._once(heads, key, value)
        if len(patches) > 1:
            lengths = [_tokens(step, ranks) for ranks in holds[ring.index]]
            parts = start_gather(torch.stack((key, value)), lengths, 2, patch, context.traffic).wait()
            key, value = torch.cat(parts, dim=2)
        if not query.shape[1] and ring.size == 1:
            return torch.empty_like(query)
        if self._is_paired(query):
            if ring.size > 1:  # a frame's keys are on all of them
                key, value = self._gather_ring(key, value, [sum(_tokens(step, ranks) for ranks in held) for held in holds])
            places = tuple(step.image[rank] for held in holds for ranks in held for rank in ranks)
            return self._attend_paired(step, query, key, value, places, scale)
        masks = [_cat([step.mask(ranks) for ranks in held]) for held in holds]
        if ring.size == 1:
            return context.kernel.attend(query, key, value, masks[0], scale)
        lengths = [sum(_tokens(step, ranks) for ranks in held) for held in holds]
        return ring_attention(
            query, key, value, lengths, masks, context.kernel.attend_lse, scale, step.overlap, ring, context.traffic
        )

    def _attend_buffered(self, step: AttentionStep, query, key, value, scale, heads: Span) -> torch.Tensor:
        """Attention over the K/V buffer, after fresh keys and values are written to it. `heads`: see _attend_fresh.

        Keys do not rotate over the ring here: rotating the whole buffer for each band would move M times as much. Each ring
        rank gathers the band's keys, which moves as much as rotating the band, and has a whole buffer.
        """
        context = self.context
        patch, ring = context.patch, context.ring
        key, value = self._once(heads, key, value)
        if ring.size > 1:
            lengths = [_tokens(step, context.ulysses_ranks(patch.index, index)) for index in range(ring.size)]
            key, value = self._gather_ring(key, value, lengths)
        own = context.patch_ranks(patch.index)
        arriving = None
        if patch.size > 1:
            lengths = [_tokens(step, context.patch_ranks(index)) for index in range(patch.size)]
            gathering = self._start_patches(step, torch.stack((key, value)), lengths)
            if step.stale:
                pieces = [step.pieces(context.patch_ranks(i)) if i != patch.index else [] for i in range(patch.size)]
                arriving = Arriving(gathering, pieces, step.entries)
                if not step.overlap:
                    gathering.wait_pending()
            else:
                parts = gathering.wait()
                if context.changes is not None:
                    step.buffer.held[self.layer, step.entries] = Held(context.changes, parts)
                key, value = torch.cat(parts, dim=2)
                own = range(len(step.lengths))
        pieces, image = step.pieces(own), step.over_image
        keys, values = step.buffer.update(self.layer, key, value, pieces, step.entries, step.text_tokens, image)
        if arriving is not None:
            step.buffer.add_pending(self.layer, arriving)
        if not query.shape[1]:
            return torch.empty_like(query)
        if self._is_paired(query):
            return self._attend_paired(step, query, keys, values, (Span(0, keys.shape[1]),), scale)
        return context.kernel.attend(query, keys, values, step.buffer_mask(keys.shape[1]), scale)

    def _start_patches(self, step: AttentionStep, own: torch.Tensor, lengths: list[int]) -> Gathering | ChangeGathering:
        """Start to gather keys and values [2, B, k, h, D] over the patch ranks, which have `lengths` tokens each.

        What changed in them, if that is wanted and the ranks hold those of an exact call.
        """
        patch, traffic = self.context.patch, self.context.traffic
        held = step.buffer.held.get((self.layer, step.entries)) if step.stale else None
        if held is None or not held.fits([(*own.shape[:2], length, *own.shape[3:]) for length in lengths]):
            return start_gather(own, lengths, 2, patch, traffic)
        return held.start_gather(own, patch, traffic)

    def _is_paired(self, query: torch.Tensor) -> bool:
        return self.over == PAIRED and query.shape[-1] > self.head_size

    def _attend_paired(self, step: AttentionStep, query, key, value, places: tuple[Span, ...], scale) -> torch.Tensor:
        """`places`: those of the keys, one behind the other."""
        context = self.context
        own = tuple(step.image[rank] for rank in context.ulysses_ranks(context.patch.index, context.ring.index))
        rows = step.frames.of(own), step.frames.of(places)
        return paired_attention(context.kernel, query, key, value, *rows, scale)

    def _gather_ring(self, key, value, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all ring ranks, which have `lengths` tokens each."""
        gathering = start_gather(torch.stack((key, value)), lengths, 2, self.context.ring, self.context.traffic)
        return torch.cat(gathering.wait(), dim=2).unbind(0)


def _tokens(step: AttentionStep, ranks: range) -> int:
    return sum(step.lengths[rank] for rank in ranks)


def _cat(masks: list[torch.Tensor | None]) -> torch.Tensor | None:
    return None if masks[0] is None else torch.cat(masks, dim=1)


def install_parallel_attention(modules: list[tuple[torch.nn.Module, str]], context: AttentionContext) -> None:
    """Give each attention module, in order, its own ParallelAttention, and route diffusers' native backend through it.

    Modules without one, of another model in the process, keep diffusers' behaviour. Idempotent.
    """
    for layer, (module, over) in enumerate(modules):
        if not hasattr(module.processor, "_parallel_config"):
            module.processor = SdpaProcessor(module.processor)
        module.processor._parallel_config = ParallelAttention(
            context, layer, over, module.inner_dim // module.heads if over == PAIRED else 0
        )
        module.processor._attention_backend = AttentionBackendName.NATIVE
    registry = _AttentionBackendRegistry._backends
    native = registry[AttentionBackendName.NATIVE]
    if getattr(native, "knows_parallel_attention", False):
        return

    def dispatch(query, key, value, attn_mask=None, scale=None, _parallel_config=None, **options):
        if not hasattr(_parallel_config, "attend"):
            return native(query, key, value, attn_mask=attn_mask, scale=scale, _parallel_config=_parallel_config, **options)
        return _parallel_config.attend(query, key, value, scale, attn_mask)

    dispatch.knows_parallel_attention = True
    registry[AttentionBackendName.NATIVE] = dispatch
