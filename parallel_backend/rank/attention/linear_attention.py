"""Linear attention (Sana, arXiv 2410.10629) over a sequence that ring and Ulysses ranks share.

Linear attention reads other tokens only as two sums over all tokens, which are added up over the ranks. The 3 x 3
convolutions of the feed-forward read neighbouring tokens: ranks exchange the tokens at the edges of their shards. There are
no keys or values that a later step could reuse.
"""

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import nn

from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import LINEAR, NEIGHBOURS
from parallel_backend.rank.comm.collectives import all_reduce, start_gather

from .context import AttentionContext, AttentionStep

EPSILON = 1e-15


class SharedLinearAttention:
    """diffusers' SanaLinearAttnProcessor2_0, with its sums over the tokens of all ranks."""

    def __init__(self, context: AttentionContext):
        self.context = context

    def __call__(
        self, attn: Attention, hidden_states: torch.Tensor, encoder_hidden_states: None = None, attention_mask: None = None
    ) -> torch.Tensor:
        """[b, n, hidden] of the rank's tokens -> the same shape. Sums are in float32."""
        assert encoder_hidden_states is None and attention_mask is None, "linear attention is over all of the image"
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        if attn.norm_q is not None:
            query, key = attn.norm_q(query), attn.norm_k(key)
        q_bHnD, k_bHnD, v_bHnD = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2).float() for x in (query, key, value))
        q_bHnD, k_bHnD = F.relu(q_bHnD), F.relu(k_bHnD)
        # The column of ones sums up the keys alone, by which the output is divided.
        sums = k_bHnD.transpose(2, 3) @ F.pad(v_bHnD, (0, 1), value=1.0)
        for axis in (self.context.ulysses, self.context.ring):
            if axis.size > 1:
                sums = all_reduce(sums, axis, self.context.traffic)
        out, weight = (q_bHnD @ sums).split((v_bHnD.shape[-1], 1), dim=-1)
        out = (out / (weight + EPSILON)).transpose(1, 2).flatten(2).to(hidden_states.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        return out.clip(-65504, 65504) if out.dtype == torch.float16 else out


class Neighbourhood:
    """Hooks around 3 x 3 convolutions: their input gets the rows around the rank's tokens, their output loses them."""

    def __init__(self, context: AttentionContext):
        self.context = context

    def widen(self, _module: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """[b, c, 1, n] of the rank's tokens -> [b, c, rows, columns]: their whole rows, and one more row on either side.

        Tokens farther than a row and a column from the rank's tokens are zero. They do not change the rank's output.
        """
        step, own = self.context.step, arguments[0].flatten(2)
        window, here = self._window(step), step.image[self._place]
        wide = own.new_zeros(*own.shape[:2], len(window))
        for edge, tokens in self._edges(own, step):
            part = _overlap(edge, window)
            wide[..., part.shift(-window.start).slice] = tokens[..., part.shift(-edge.start).slice]
        wide[..., here.shift(-window.start).slice] = own
        return (wide.unflatten(2, (-1, step.row)),)

    def narrow(self, _module: nn.Module, _arguments: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """[b, c, rows, columns] -> [b, c, 1, n] of the rank's tokens."""
        step = self.context.step
        here = step.image[self._place].shift(-self._window(step).start)
        return out.flatten(2)[..., None, here.slice]

    @property
    def _place(self) -> int:
        return self.context.ring.index * self.context.ulysses.size + self.context.ulysses.index

    def _window(self, step: AttentionStep) -> Span:
        """Tokens of the rank's rows and one row on either side, within the picture."""
        here, rows = step.image[self._place], step.image[-1].stop // step.row
        first, last = max(0, here.start // step.row - 1), min(rows, -(-here.stop // step.row) + 1)
        return Span(first * step.row, last * step.row)

    def _edges(self, own: torch.Tensor, step: AttentionStep) -> list[tuple[Span, torch.Tensor]]:
        """Gather every rank's tokens that others may need: those within a row and a column of its shard's ends."""
        context, traffic = self.context, self.context.traffic
        edges = [_edges_of(span, step.row + 1) for span in step.image]
        lengths = [sum(len(edge) for edge in of_rank) for of_rank in edges]
        start = step.image[self._place].start
        sent = torch.cat([own[..., edge.shift(-start).slice] for edge in edges[self._place]], dim=2)
        for axis, counts in (
            (context.ulysses, [lengths[rank] for rank in context.ulysses_ranks(0, context.ring.index)]),
            (context.ring, [sum(lengths[rank] for rank in context.ulysses_ranks(0, r)) for r in range(context.ring.size)]),
        ):
            if axis.size > 1:
                sent = torch.cat(start_gather(sent, counts, 2, axis, traffic).wait(), dim=2)
        flat = [edge for of_rank in edges for edge in of_rank]
        if len(edges) == 1:
            return []
        return list(zip(flat, sent.split([len(edge) for edge in flat], dim=2), strict=True))


def _edges_of(span: Span, width: int) -> tuple[Span, ...]:
    if len(span) <= 2 * width:
        return (span,)
    return Span(span.start, span.start + width), Span(span.stop - width, span.stop)


def _overlap(one: Span, two: Span) -> Span:
    start = max(one.start, two.start)
    return Span(start, max(start, min(one.stop, two.stop)))


def install_linear(modules: list[tuple[nn.Module, str]], context: AttentionContext) -> None:
    """Hook a stage's LINEAR and NEIGHBOURS modules (base/blocks.py) up over the sequence axes."""
    for module, over in modules:
        if over == LINEAR:
            module.processor = SharedLinearAttention(context)
        elif over == NEIGHBOURS:
            neighbourhood = Neighbourhood(context)
            module.register_forward_pre_hook(neighbourhood.widen)
            module.register_forward_hook(neighbourhood.narrow)
