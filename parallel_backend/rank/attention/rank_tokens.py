"""The tokens of ComfyUI's own class on one rank: split over sequence ranks, or into bands (own_class/cuts/token_cut.py).

An attention call passes through a chain of forms (`_chain`), each a class with one method: Ulysses, SharedKeys, then Ring or
a form that makes all keys known (Gathered, Bands, DisplacedPatches, WordsOnce). The last one, Together, calls the kernel
(local.py).
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from parallel_backend.core.own_class import OwnAttention, OwnBlock
from parallel_backend.core.sequence import SequenceCut
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.token_cut import HOST, AttentionCall, TokenCut
from parallel_backend.rank.comm.collectives import start_gather

from .bands import Bands, DisplacedPatches, WordsOnce
from .context import AttentionStep, Form, LayerCall
from .gathered import Gathered, SharedKeys, Together, of_axis
from .kv_buffer import Piece
from .local import StageAttention, kept_numbers
from .ring import Ring
from .ulysses import Ulysses

IN_BUFFER = "in buffer"
"""First item of keys of TokenCut.known."""


class RankTokens(TokenCut):
    """This rank's tokens, split over `ranks`. `attention`: the stage's."""

    def __init__(self, blocks: Sequence[OwnBlock], attention: StageAttention, ranks: SequenceCut):
        self._attention, self._context = attention, attention.context
        ranks = SequenceCut((1.0,), ranks.inner, repeat_text=False) if self._context.naive else ranks
        super().__init__(blocks, self._context.of_ulysses[self._context.ulysses.index], ranks)
        self.alone, self.attend_whole = self._context.naive, attention.attend
        counts = [len(block.attention) for block in self.blocks]
        self._layers = list(itertools.accumulate(counts, initial=0))  # by block: number of its first call of attention
        self._whole, self._in_run, self._words_once = self._chain(), self._chain(in_run=True), self._chain(words_once=True)
        self._form: Form = self._whole  # of this call

    def _chain(self, in_run: bool = False, words_once: bool = False) -> Form:
        """Return the chain of forms for attention calls. `in_run`: the calls use a K/V buffer. `words_once`: they use stored
        keys of the text."""
        context = self._context
        patch, ring, traffic = context.patch, context.ring, context.traffic
        form: Form = Together()
        if in_run:
            form = (Bands if patch.size == 1 else DisplacedPatches)(form, context, self)
        elif words_once:
            form = WordsOnce(form, context, self)
        if patch.size > 1 and not in_run:
            form = Gathered(form, patch, context.of_patches, traffic)
        if ring.size > 1:
            form = Gathered(form, ring, context.of_ring, traffic)
            if patch.size == 1 and not in_run and not words_once:
                form = Ring(form, context)
        if not isinstance(form, Together) and any(spec.sharing > 1 for block in self.blocks for spec in block.attention):
            form = SharedKeys(form)
        return form if context.ulysses.size == 1 else Ulysses(form, context, in_one=in_run)

    @property
    def _step(self) -> AttentionStep:
        assert self._attention.step is not None, "attention outside of a micro-step"
        return self._attention.step

    @property
    def cuts(self) -> bool:
        return self.alone or self.ranks.size > 1 or self._step.in_bands

    def known(self) -> dict[Any, Any]:
        return self._step.known

    def begin(self) -> None:
        super().begin()
        step = self._step
        if not step.in_bands and not self.alone:
            self.band = None
        assert not (step.in_bands or self.alone) or self.band is not None, "bands are refused if no trial has proven them"
        if self.band is not None and not step.message.with_text:
            self.band = replace(self.band, words_have_run=True)
        outside = self._whole if step.words is None else self._words_once
        self._form = outside if step.buffer is None else self._in_run

    @property
    def _layer(self) -> int:
        """Number of the present call among all attention calls of the class."""
        return self._layers[self.number] + self.attended - 1

    def exchange(self, spec: OwnAttention, call: AttentionCall, mask_bK: torch.Tensor | None) -> torch.Tensor:
        step, q_BQHD = self._step, call.q_BQHD
        kernel, gate, heads = self._attention.kernel_of(call, step), step.take_gate(q_BQHD), Span(0, q_BQHD.shape[2])
        lengths = self.lengths(spec.queries), self.lengths(spec.keys)
        at = LayerCall(call, step, kernel, self, gate, heads, mask_bK, spec, self._layer, *lengths)
        return self._form.attend(at, q_BQHD, call.k_BKHD, call.v_BKHD)

    def numbers(self, at: LayerCall, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token numbers, see context.TokenNumbers: those of the queries after Ulysses' gather, and of the keys known
        so far."""
        of_queries, of_keys, in_bands = at.spec.queries, at.spec.keys, at.step.in_bands

        def query_numbers() -> torch.Tensor:
            return torch.cat([self.rows(of_queries, rank, HOST) for rank in self._context.of_ulysses])

        def key_numbers() -> torch.Tensor:
            if not in_bands or self.band is None:
                return self.all_rows(of_keys, HOST)
            return self.band.in_buffer(of_keys, self.tokens, HOST)[:keys]

        # What numbers depend on in calls with the same conditioning.
        band = None if self.band is None else (self.band.band, self.band.has_words)
        of_call: Hashable = in_bands, tuple(self.tokens.items()), band
        return (
            kept_numbers(at.step, ("queries", of_queries, of_call), query_numbers),
            kept_numbers(at.step, ("keys", of_keys, keys, of_call), key_numbers),
        )

    def places(self, streams: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """See context.TokenNumbers."""
        return functools.partial(self.all_rows, streams, HOST)

    def mask_of_all(self, mask_bK: torch.Tensor, streams: tuple[int, ...]) -> torch.Tensor:
        """The mask in the order of keys. In a run of bands, masks of this band's keys are stored for the other bands."""
        step, band = self._step, self.band
        buffer = step.buffer
        if not step.in_bands or band is None:
            return super().mask_of_all(mask_bK, streams)
        tokens = sum(self.tokens[stream] for stream in streams)
        if mask_bK.shape[1] == tokens:
            return mask_bK[:, band.in_buffer(streams, self.tokens, mask_bK.device)]
        if buffer is None or mask_bK.shape[1] != self.lengths(streams)[self.index]:
            raise Unproven(f"{self.block.name} attends with a mask that has other keys than in the trial")
        of_ranks = self.gather(mask_bK.to(torch.uint8)[..., None], streams)[..., 0].bool()
        if self._layer not in buffer.masks:
            buffer.masks[self._layer] = of_ranks.new_ones(buffer.batch, tokens)
        kept = buffer.masks[self._layer][step.message.entries.slice]
        for rows, positions in self.in_buffer(streams, range(self.ranks.size))[0]:
            kept[:, positions.slice] = of_ranks[:, rows.slice]
        return kept

    def in_buffer(self, streams: tuple[int, ...], ranks: range) -> tuple[list[Piece], int, bool]:
        """See bands.Places."""
        key = IN_BUFFER, streams, ranks
        if key not in self._known:
            assert self.band is not None
            pieces, words = self.band.pieces(streams, self.tokens, self.ranks, ranks), self.band.words(streams, self.tokens)
            self._known[key] = pieces, words, not set(self.band.latent.streams).isdisjoint(streams)
        return self._known[key]

    def gather(self, value: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
        context, lengths = self._context, self.lengths(streams)
        of_ulysses = tuple(range(rank, rank + 1) for rank in context.of_ulysses)
        axes = (context.ulysses, of_ulysses), (context.ring, context.of_ring), (context.patch, context.of_patches)
        for axis, ranks in axes:
            if axis.size > 1:
                value = torch.cat(start_gather(value, of_axis(lengths, ranks), 1, axis, context.traffic).wait(), dim=1)
        return value
