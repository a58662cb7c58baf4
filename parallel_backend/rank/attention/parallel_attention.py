"""The one place where attention is parallel: diffusers' dispatcher, given a `ParallelAttention` by the layer's
processor, lands here.

Order of composition: Ulysses all-to-all in; keys and values of the other ring and patch ranks, or the ring; the K/V
buffer; the attention kernel; all-to-all out. Queries and keys arrive normalised and with rotary embedding applied,
[B, s, H, D].
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from parallel_backend.families.base.blocks import IMAGE, JOINT
from parallel_backend.rank.comm.collectives import start_gather

from .context import AttentionContext, AttentionStep
from .kv_buffer import Arriving
from .ring import ring_attention
from .sdpa_redirect import SdpaProcessor
from .ulysses import head_groups, start_heads_to_sequence, start_sequence_to_heads

HEAD_GROUPS = {"cuda": 2, "cpu": 1}
"""Head groups per Ulysses rank, by device. One group's all-to-all overlaps another group's attention.

On a CPU nothing is gained: its cores carry the transfers themselves (docs/performance.md).
"""

LEAST_WORK = 1 << 14
"""Query tokens times heads times batch entries that keep a large GPU busy: tiles of 128 by 128 multiprocessors."""


@dataclass(frozen=True)
class ParallelAttention:
    """Rides in a processor's `_parallel_config`: says which layer is calling, and where the micro-step is described."""

    context: AttentionContext
    layer: int
    over: str = JOINT

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, s, H, D] of the rank's own tokens -> [B, s, H, D], attention over all tokens of the sequence.

        A mask must come with the micro-step, since one from the model would know this rank's keys only.
        """
        context, step = self.context, self.context.step
        assert step is not None, "attention outside of a micro-step"
        assert mask is None or context.drops_mask, "this family's own forward passes an attention mask"
        step = step.of_image if self.over == IMAGE else step
        axis, heads = context.ulysses, query.shape[2]
        lengths = [step.lengths[rank] for rank in context.ulysses_ranks(context.patch.index, context.ring.index)]
        if (surplus := query.shape[1] - lengths[axis.index]) > 0:  # the token in the place of no text (BlockList.needs_text)
            sides = (surplus, 0) if step.text_first else (0, surplus)
            kept = slice(sides[0], query.shape[1] - sides[1])
            return F.pad(self.attend(*(x[:, kept] for x in (query, key, value)), scale, mask), (0, 0, 0, 0, *sides))
        attend = self._attend_fresh if step.buffer is None else self._attend_buffered
        if axis.size == 1:
            return attend(step, query, key, value, scale)
        groups = head_groups(heads, axis.size, self._groups(step, query))
        shared = (axis, context.traffic, context.codec)
        ready = start_sequence_to_heads(query, key, value, lengths, groups[0], *shared)
        out, finishing = torch.empty_like(query, memory_format=torch.contiguous_format), []
        for number, group in enumerate(groups, 1):
            own = ready()
            if number < len(groups):
                ready = start_sequence_to_heads(query, key, value, lengths, groups[number], *shared)
            finishing.append(start_heads_to_sequence(attend(step, *own, scale), out, lengths, group, *shared))
        for finish in finishing:
            finish()
        return out

    def _groups(self, step: AttentionStep, query: torch.Tensor) -> int:
        """In how many parts the rank's heads are attended to, so that those of one travel beside the other's attention."""
        heads = query.shape[2] // self.context.ulysses.size
        groups = HEAD_GROUPS[query.device.type]
        work = len(query) * sum(step.lengths) * (heads // groups)
        whole = not step.overlap or step.buffer is not None or heads < groups
        return 1 if whole or (query.is_cuda and work < LEAST_WORK) else groups

    def _attend_fresh(self, step: AttentionStep, query, key, value, scale) -> torch.Tensor:
        """Everything that is attended to was computed in this call."""
        context = self.context
        patch, ring = context.patch, context.ring
        patches = [patch.index] if context.naive else list(range(patch.size))
        # Per ring rank: the sequence ranks whose keys it holds once those of the other patches are there.
        holds = [[context.ulysses_ranks(p, r) for p in patches] for r in range(ring.size)]
        if len(patches) > 1:
            lengths = [_tokens(step, ranks) for ranks in holds[ring.index]]
            parts = start_gather(torch.stack((key, value)), lengths, 2, patch, context.traffic).wait()
            key, value = torch.cat(parts, dim=2)
        masks = [_cat([step.mask(ranks) for ranks in held]) for held in holds]
        if ring.size == 1:
            return context.kernel.attend(query, key, value, masks[0], scale)
        lengths = [sum(_tokens(step, ranks) for ranks in held) for held in holds]
        return ring_attention(
            query, key, value, lengths, masks, context.kernel.attend_lse, scale, step.overlap, ring, context.traffic
        )

    def _attend_buffered(self, step: AttentionStep, query, key, value, scale) -> torch.Tensor:
        """Fresh keys and values go into the buffer, which holds those of the tokens that do not run now.

        The ring does not rotate here: a rotation of the whole buffer for each band would move M times as much. Each
        ring rank gathers the band's keys instead (as much as a rotation of the band) and keeps the buffer whole.
        """
        context = self.context
        patch, ring, traffic = context.patch, context.ring, context.traffic
        if ring.size > 1:
            lengths = [_tokens(step, context.ulysses_ranks(patch.index, index)) for index in range(ring.size)]
            key, value = torch.cat(start_gather(torch.stack((key, value)), lengths, 2, ring, traffic).wait(), dim=2)
        own = context.patch_ranks(patch.index)
        arriving = None
        if patch.size > 1:
            lengths = [_tokens(step, context.patch_ranks(index)) for index in range(patch.size)]
            gathering = start_gather(torch.stack((key, value)), lengths, 2, patch, traffic)
            if step.stale:
                pieces = [step.pieces(context.patch_ranks(i)) if i != patch.index else [] for i in range(patch.size)]
                arriving = Arriving(gathering, pieces, step.entries)
                if not step.overlap:
                    gathering.wait_pending()
            else:
                key, value = torch.cat(gathering.wait(), dim=2)
                own = range(len(step.lengths))
        keys, values = step.buffer.update(self.layer, key, value, step.pieces(own), step.entries, step.text_tokens)
        if arriving is not None:
            step.buffer.add_pending(self.layer, arriving)
        return context.kernel.attend(query, keys, values, step.buffer_mask(keys.shape[1]), scale)


def _tokens(step: AttentionStep, ranks: range) -> int:
    return sum(step.lengths[rank] for rank in ranks)


def _cat(masks: list[torch.Tensor | None]) -> torch.Tensor | None:
    return None if masks[0] is None else torch.cat(masks, dim=1)


def install_parallel_attention(modules: list[tuple[torch.nn.Module, str]], context: AttentionContext) -> None:
    """Give each attention module, in order, a ParallelAttention of its own and route diffusers' native backend through it.

    Calls without one (another model in the process) keep diffusers' own behaviour. Idempotent.
    """
    for layer, (module, over) in enumerate((module, over) for module, over in modules if over in (JOINT, IMAGE)):
        if not hasattr(module.processor, "_parallel_config"):
            module.processor = SdpaProcessor(module.processor)
        module.processor._parallel_config = ParallelAttention(context, layer, over)
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
