"""The order of a call's tokens in ComfyUI's joint sequence, on which block-sparse attention depends, as no other does."""

from collections.abc import Callable
from dataclasses import dataclass

from parallel_backend.core.spans import Span

VIDEO, SOUND, REST = "video", "sound", "rest"
"""Kinds of segments: the latent's own video, its own sound, and everything else."""


@dataclass(frozen=True)
class CallTokens:
    """Numbers of tokens of a call."""

    text: int
    """Of the text stream, in which a companion latent's come first."""
    companion: int
    image: int
    """Of the picture or video, without references."""
    references: tuple[tuple[int, int], ...] = ()
    """See SparseAttention."""
    reference_tokens: int = 0


@dataclass(frozen=True)
class Segment:
    """Tokens in a row of the joint sequence, all of one picture, video, sound or text."""

    tokens: Span
    """Numbers in the text stream, or in the image: first the latent's tokens by frames, rows, columns, then references."""
    of_image: bool
    kind: str = REST


Segments = Callable[[CallTokens], list[Segment] | None]
"""The segments of a call in the order of the joint sequence. None: attention stays in full."""


def text_then_image(call: CallTokens) -> list[Segment]:
    image = Span(0, call.image + call.reference_tokens)
    return [Segment(Span(0, call.text), of_image=False), Segment(image, of_image=True)]
