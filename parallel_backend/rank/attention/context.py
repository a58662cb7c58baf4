"""What parallel attention must know: AttentionContext of the loaded model, and AttentionStep of the micro-step under way."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from parallel_backend.core.degrees import Degrees
from parallel_backend.core.spans import Span
from parallel_backend.rank.comm.mesh import Axis
from parallel_backend.rank.comm.transfer_codec import Codec
from parallel_backend.rank.comm.transfers import Traffic

from .kernels import Kernel
from .kv_buffer import KVBuffer, Piece


@dataclass
class AttentionStep:
    """What attention must know of the micro-step under way; the same on all ranks of a stage.

    `text`, `image`: the micro-step's tokens by sequence rank (sequence.SequenceCut), both counted from their stream's
    start. `stale`: displaced patches use the other bands' keys of the call before. `text_mask`: [b, T] bool, which text
    tokens may be seen; None for all. `image_padding`: so many of the text's first tokens are the image's (Family.padded).
    """

    text_tokens: int  # of the whole sequence, whether or not the text runs in this micro-step
    text: tuple[Span, ...]
    image: tuple[Span, ...]
    entries: Span
    buffer: KVBuffer | None
    stale: bool = False
    overlap: bool = True
    text_first: bool = True
    text_mask: torch.Tensor | None = None
    image_padding: int = 0
    row: int = 0  # image tokens in a row
    _masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)

    @cached_property
    def of_image(self) -> "AttentionStep":
        """The same micro-step for layers that attend over the image alone, with its padding."""
        padding = tuple(text.before(self.image_padding) for text in self.text)
        return replace(self, text_tokens=self.image_padding, text=padding, text_mask=None, _masks={})

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens by sequence rank."""
        return [len(text) + len(image) for text, image in zip(self.text, self.image, strict=True)]

    def pieces(self, ranks: range) -> list[Piece]:
        """(rows among these sequence ranks' tokens, rank after rank; their positions in the K/V buffer)."""
        pieces, row = [], 0
        for rank in ranks:
            streams = ((self.text[rank], 0), (self.image[rank], self.text_tokens))
            for span, offset in streams if self.text_first else reversed(streams):
                if len(span):
                    pieces.append((Span(row, row + len(span)), span.shift(offset)))
                    row += len(span)
        return pieces

    def mask(self, ranks: range) -> torch.Tensor | None:
        """[b, n] bool over these ranks' tokens, rank after rank. None where all may be seen."""
        if self.text_mask is None:
            return None
        key = (ranks.start, ranks.stop)
        if key not in self._masks:
            whole = self.buffer_mask(self.text_tokens + max(image.stop for image in self.image))
            parts = [whole[:, positions.slice] for _, positions in self.pieces(ranks)]
            self._masks[key] = torch.cat([whole[:, :0], *parts], dim=1)
        return self._masks[key]

    def buffer_mask(self, filled: int) -> torch.Tensor | None:
        """[b, filled] bool over the K/V buffer's first tokens."""
        if self.text_mask is None:
            return None
        image = self.text_mask.new_ones(len(self.text_mask), filled - self.text_tokens)
        return torch.cat((self.text_mask, image), dim=1)


class AttentionContext:
    """Shared by all layers of a stage: the parts that stay (axes, kernel, counters) and the micro-step under way."""

    def __init__(
        self,
        degrees: Degrees,
        axes: dict[str, Axis],
        kernel: Kernel,
        traffic: Traffic,
        drops_mask: bool = False,
        codec: Codec | None = None,
    ):
        self.patch, self.ring, self.ulysses = axes["patch"], axes["ring"], axes["ulysses"]
        self.naive = degrees.naive
        self.drops_mask = drops_mask  # see Family
        self.kernel, self.traffic, self.codec = kernel, traffic, codec
        self.step: AttentionStep | None = None

    # Sequence ranks are counted patch, ring, ulysses, so each of these is a range.

    def ulysses_ranks(self, patch: int, ring: int) -> range:
        first = (patch * self.ring.size + ring) * self.ulysses.size
        return range(first, first + self.ulysses.size)

    def patch_ranks(self, patch: int) -> range:
        size = self.ring.size * self.ulysses.size
        return range(patch * size, (patch + 1) * size)
