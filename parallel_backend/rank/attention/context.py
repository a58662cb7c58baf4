"""State that parallel attention reads: AttentionContext of the loaded model, AttentionStep of the micro-step under way."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import IMAGE, IMAGE_TO_TEXT, JOINT, PAIRED, TEXT, TEXT_TO_IMAGE
from parallel_backend.rank.comm.change_codec import ChangeCodec
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import Codec
from parallel_backend.rank.comm.transfers import Traffic

from .frame_rows import FrameRows
from .kernel_choice import RankKernel
from .kv_buffer import KVBuffer, Piece


@dataclass
class AttentionStep:
    """The micro-step under way, as attention sees it. The same on all ranks of a stage."""

    text_tokens: int
    """Text tokens of the whole sequence, also if the text does not run in this micro-step."""
    text: tuple[Span, ...]
    """The micro-step's text tokens by sequence rank (sequence.SequenceCut), from the text's start."""
    image: tuple[Span, ...]
    """Its image tokens by sequence rank, from the image's start."""
    entries: Span
    """Batch entries."""
    buffer: KVBuffer | None
    """Of the run. None outside of runs."""
    stale: bool = False
    """Displaced patches use the other bands' keys of the call before."""
    overlap: bool = True
    """Transfers run beside compute where possible."""
    text_first: bool = True
    text_mask: torch.Tensor | None = None
    """[b, T] bool: text tokens that may be seen. None: all."""
    image_padding: int = 0
    """First tokens of the text that belong to the image (Family.image_padding)."""
    over_image: bool = True
    """The image's tokens are among the keys."""
    queries: list[int] | None = None
    """Query tokens by sequence rank. None: the tokens that keys are made of."""
    frames: FrameRows | None = None
    """Of a video. None for pictures."""
    guidance: NormalizedGuidance | None = None
    """Of the layers that mix text and image."""
    _masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _over: dict[str, "AttentionStep"] = field(default_factory=dict)

    def over(self, tokens: str) -> "AttentionStep":
        """The micro-step as layers see it that mix these tokens (base/blocks.py)."""
        if tokens in (JOINT, PAIRED):
            return self  # kept in itself it would hold the K/V buffer until Python looks for cycles
        if tokens not in self._over:
            self._over[tokens] = self._of_streams(tokens)
        return self._over[tokens]

    def _of_streams(self, tokens: str) -> "AttentionStep":
        if tokens == IMAGE:  # and its padding
            padding = tuple(text.before(self.image_padding) for text in self.text)
            return replace(self, text_tokens=self.image_padding, text=padding, text_mask=None, _masks={}, _over={})
        none = (Span(0, 0),) * len(self.text)
        if tokens == TEXT_TO_IMAGE:
            queries = [len(text) for text in self.text]
            return replace(self, text_tokens=0, text=none, text_mask=None, queries=queries, _masks={}, _over={})
        assert tokens in (TEXT, IMAGE_TO_TEXT)
        queries = [len(image) for image in self.image] if tokens == IMAGE_TO_TEXT else None
        return replace(self, image=none, over_image=False, queries=queries, _masks={}, _over={})

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens that keys are made of, by sequence rank."""
        return [len(text) + len(image) for text, image in zip(self.text, self.image, strict=True)]

    @cached_property
    def query_lengths(self) -> list[int]:
        """Query tokens by sequence rank."""
        return self.lengths if self.queries is None else self.queries

    @property
    def runs(self) -> bool:
        """Whether any rank has tokens of it in this micro-step."""
        return any(self.query_lengths) or (self.buffer is not None and any(self.lengths))

    def pieces(self, ranks: range) -> list[Piece]:
        """(rows among the concatenated tokens of these sequence ranks, positions of those in the K/V buffer)."""
        pieces, row = [], 0
        for rank in ranks:
            streams = ((self.text[rank], 0), (self.image[rank], self.text_tokens))
            for span, offset in streams if self.text_first else reversed(streams):
                if len(span):
                    pieces.append((Span(row, row + len(span)), span.shift(offset)))
                    row += len(span)
        return pieces

    def mask(self, ranks: range) -> torch.Tensor | None:
        """[b, n] bool over the concatenated tokens of these ranks. None: all may be seen."""
        if self.text_mask is None:
            return None
        key = (ranks.start, ranks.stop)
        if key not in self._masks:
            whole = self.buffer_mask(self.text_tokens + max(image.stop for image in self.image))
            parts = [whole[:, positions.slice] for _, positions in self.pieces(ranks)]
            self._masks[key] = torch.cat([whole[:, :0], *parts], dim=1)
        return self._masks[key]

    def buffer_mask(self, filled: int) -> torch.Tensor | None:
        """[b, filled] bool over the first tokens of the K/V buffer. None: all may be seen."""
        if self.text_mask is None:
            return None
        image = self.text_mask.new_ones(len(self.text_mask), filled - self.text_tokens)
        return torch.cat((self.text_mask, image), dim=1)


EarlyValues = Callable[[], torch.Tensor]
"""Waits for the values of the layer under way, which travel already: [B, S, h, D], all tokens of the Ulysses ranks and this
rank's heads."""


class AttentionContext:
    """State shared by all layers of a stage: axes, kernel, counters, and the micro-step under way."""

    def __init__(
        self,
        degrees: Degrees,
        axes: dict[str, Axis],
        kernel: RankKernel,
        traffic: Traffic,
        drops_mask: bool = False,
        codec: Codec | None = None,
        sharing: int = 1,
        changes: ChangeCodec | None = None,
    ):
        """`codec`: of what Ulysses sends. `changes`: of what displaced patches send, None: keys and values as they are.

        `sharing`: query heads in a row that share keys and values, which the class repeats for each of them.
        """
        self.patch, self.ring, self.ulysses, self.tensor = axes["patch"], axes["ring"], axes["ulysses"], axes["tensor"]
        self.naive = degrees.naive
        self.drops_mask = drops_mask  # see Family
        self.kernel, self.traffic, self.codec, self.changes, self.sharing = kernel, traffic, codec, changes, sharing
        self.step: AttentionStep | None = None
        self.early_values: EarlyValues | None = None

    def ulysses_ranks(self, patch: int, ring: int) -> range:
        """Sequence ranks at this place of the patch and ring axes. Sequence ranks are numbered patch, ring, ulysses."""
        first = (patch * self.ring.size + ring) * self.ulysses.size
        return range(first, first + self.ulysses.size)

    def patch_ranks(self, patch: int) -> range:
        """Sequence ranks at this place of the patch axis."""
        size = self.ring.size * self.ulysses.size
        return range(patch * size, (patch + 1) * size)
