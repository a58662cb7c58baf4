"""State that parallel attention reads: AttentionContext of the loaded model, AttentionStep of the micro-step that runs."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import CAUSAL_TEXT
from parallel_backend.rank.comm.change_codec import changes_for
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import codec_for
from parallel_backend.rank.comm.transfers import Traffic

from .kernel_choice import RankKernel
from .kv_buffer import KVBuffer, Piece
from .prefix_keys import PrefixKeys
from .sparse import SparseCalls, SparseStep
from .text_runs import TextRun
from .token_groups import TokenGroups


@dataclass
class AttentionStep:
    """Which tokens the present micro-step (one band or a whole call) computes. Alike on all ranks of a stage."""

    text_tokens: int
    """Text tokens of the whole sequence, also if no text runs in this micro-step."""
    text: tuple[Span, ...]
    """The micro-step's text tokens by sequence rank (sequence.SequenceCut), counted from the text's start."""
    image: tuple[Span, ...]
    """The micro-step's image tokens by sequence rank, counted from the image's start."""
    entries: Span
    """Batch entries that the micro-step computes."""
    buffer: KVBuffer | None
    """The run's K/V buffer. None outside of runs."""
    stale: bool = False
    """Displaced patches: keys of other bands are those of the call before."""
    overlap: bool = True
    """Transfers run during compute where possible."""
    text_first: bool = True
    text_ends_T: torch.Tensor | None = None
    """int64: how many of the text's first tokens each text token sees, in layers over CAUSAL_TEXT."""
    text_runs: tuple[TextRun, ...] = ()
    """The text's tokens by what `text_ends_T` says of them."""
    prefix: PrefixKeys | None = None
    """The text's keys and values in layers over CAUSAL_TEXT. None: the model has no such layer."""
    causal: bool = False
    """Queries are text tokens that see what `text_ends_T` says."""
    frames: TokenGroups | None = None
    """The video's tokens by frame. None: no layer attends by frame."""
    windows: tuple[TokenGroups, ...] = ()
    """The video's tokens by window, for each of the ways to cut it (Blocks.windows)."""
    guidance: NormalizedGuidance | None = None
    """Normalized guidance in the layers that mix text and image."""
    sparse: SparseStep | None = None
    """Block-sparse attention. None: in full."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """See StepInputs.kept."""

    def over(self, tokens: str) -> "AttentionStep":
        """The micro-step for layers that mix `tokens`, a value of BlockList.attention (base/blocks.py)."""
        return self.causal_image if tokens == CAUSAL_TEXT else self

    @cached_property
    def causal_image(self) -> "AttentionStep":
        """The image's part of a layer over CAUSAL_TEXT, which has the text's keys in `prefix`."""
        return replace(self, text=(Span(0, 0),) * len(self.text))

    @cached_property
    def causal_text(self) -> "AttentionStep":
        """The text's part of a layer over CAUSAL_TEXT. All of a text runs in one micro-step, so its keys need no buffer."""
        none = (Span(0, 0),) * len(self.image)
        return replace(self, image=none, buffer=None, stale=False, causal=True)

    def text_pieces(self, ranks: range) -> Iterator[tuple[Span, Span, TextRun]]:
        """The text tokens of `ranks`, concatenated, run by run: (rows among them, positions in the text, their run)."""
        for (rows, positions), run in itertools.product(self.pieces(ranks), self.text_runs):
            if len(common := positions.common(run.tokens)):
                yield common.shift(rows.start - positions.start), common, run

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens by sequence rank."""
        return [len(text) + len(image) for text, image in zip(self.text, self.image, strict=True)]

    @property
    def runs(self) -> bool:
        """Whether any rank computes attention of this layer."""
        return any(self.lengths)

    def pieces(self, ranks: range) -> list[Piece]:
        """Where tokens of sequence ranks `ranks`, concatenated, belong: (rows among them, positions in the K/V buffer)."""
        pieces, row = [], 0
        for rank in ranks:
            streams = ((self.text[rank], 0), (self.image[rank], self.text_tokens))
            for span, offset in streams if self.text_first else reversed(streams):
                if len(span):
                    pieces.append((Span(row, row + len(span)), span.shift(offset)))
                    row += len(span)
        return pieces

    def pieces_of(self, ranges: list[range]) -> list[Piece]:
        """As `pieces`, of the tokens of several ranges of ranks, one behind the other."""
        pieces, row = [], 0
        for ranks in ranges:
            pieces += [(rows.shift(row), positions) for rows, positions in self.pieces(ranks)]
            row += self.tokens(ranks)
        return pieces

    def tokens(self, ranks: range) -> int:
        """Key tokens of these sequence ranks."""
        return sum(self.lengths[rank] for rank in ranks)


EarlyValues = Callable[[], torch.Tensor]
"""Waits for the transfer of the running layer's values, which has started. Returns [B, S, h, D]."""


class AttentionContext:
    """State shared by all layers of a stage: axes, kernel, counters, and the micro-step that runs."""

    def __init__(
        self,
        degrees: Degrees,
        axes: dict[str, Axis],
        kernel: RankKernel,
        traffic: Traffic,
        transfer_dtype: str,
    ):
        """`transfer_dtype`: how Ulysses and displaced patches pack what they send."""
        self.patch, self.ring, self.ulysses, self.tensor = axes["patch"], axes["ring"], axes["ulysses"], axes["tensor"]
        self.naive = degrees.naive
        self.kernel, self.traffic = kernel, traffic
        self.codec, self.changes = codec_for(transfer_dtype), changes_for(transfer_dtype)
        self.step: AttentionStep | None = None
        self.early_values: EarlyValues | None = None
        self.gate: torch.Tensor | None = None
        """VSA's gate [B, s, H x D] of the layer that runs, made of this rank's tokens."""
        self.sparse_calls = SparseCalls()

    def take_gate(self, q_BQHD: torch.Tensor) -> torch.Tensor | None:
        """`gate`, as these queries have their heads, for their layer alone. None: it has none."""
        gate, self.gate = self.gate, None
        return None if gate is None else gate.reshape(q_BQHD.shape)

    def ulysses_ranks(self, patch: int, ring: int) -> range:
        """Sequence ranks at these indices of the patch and ring axes. Sequence ranks count up by ulysses, ring, patch."""
        first = (patch * self.ring.size + ring) * self.ulysses.size
        return range(first, first + self.ulysses.size)

    def patch_ranks(self, patch: int) -> range:
        """Sequence ranks at this index of the patch axis."""
        size = self.ring.size * self.ulysses.size
        return range(patch * size, (patch + 1) * size)
