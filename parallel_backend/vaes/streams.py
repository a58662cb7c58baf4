"""Layers that get a video's frames in pieces, one after the other, and keep the frames that the next piece needs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from parallel_backend.core.spans import Span

from .base import PartModule, Piece

FRAMES = 8
"""Most frames of a piece. It bounds memory. Results do not depend on it, except for rounding."""

Pieces = Iterable[tuple[torch.Tensor, bool]]
"""(piece [B, C, frames, H, W], whether it is the last)"""


class Streaming(nn.Module):
    """A layer with a state between a video's pieces, which `forget` drops."""

    def forget(self) -> None:
        raise NotImplementedError


def forget(model: nn.Module) -> None:
    """Drop the states of the model's Streaming layers."""
    for module in model.modules():
        if isinstance(module, Streaming):
            module.forget()


class FrameByFrame(PartModule):
    """A part that gets a video's whole input at once, and returns its output in pieces of FRAMES (see `in_turn`)."""

    def __init__(self):
        super().__init__()
        self._source: Iterator[torch.Tensor] = iter(())
        self._ready: list[torch.Tensor] = []

    def frames(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """The output, in pieces of any length."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        """The whole input with the first piece, no frames with the others -> the next FRAMES frames, or those left."""
        if first:
            self._source = self.frames(x)
        while sum(part.shape[2] for part in self._ready) < FRAMES and (part := next(self._source, None)) is not None:
            self._ready.append(part)
        ready = joined(self._ready)
        self._ready = [ready[:, :, FRAMES:].clone()] if ready.shape[2] > FRAMES else []
        return ready[:, :, :FRAMES]

    def reset(self) -> None:
        self._source, self._ready = iter(()), []
        forget(self)


def in_turn(frames: int, output: int) -> tuple[Piece, ...]:
    """VAEClass.pieces of a FrameByFrame: the first piece has all of the input's `frames`. `output`: frames in all."""
    spans = [Span(0, frames), *[Span(frames, frames)] * (-(-output // FRAMES) - 1)]
    return tuple(Piece(span, min(FRAMES, output - FRAMES * index)) for index, span in enumerate(spans))


def joined(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pieces of frames as one tensor."""
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), dim=2)


def pieces(x: torch.Tensor) -> Pieces:
    """x [B, C, T, H, W] in pieces of FRAMES at most."""
    parts = x.split(FRAMES, dim=2)
    return [(part, index == len(parts) - 1) for index, part in enumerate(parts)]


def through(layer: Callable[[torch.Tensor, bool], torch.Tensor], source: Pieces) -> Iterator[tuple[torch.Tensor, bool]]:
    """`layer(piece, last)` of every piece, in pieces of FRAMES at most. A layer that looks ahead returns frames late."""
    for x, last in source:
        parts = layer(x, last).split(FRAMES, dim=2)
        for index, part in enumerate(parts):
            if part.shape[2] or last:
                yield part, last and index == len(parts) - 1


class Late(Streaming):
    """Delays a shortcut until the layer that it goes around has returned the same frames."""

    def __init__(self):
        super().__init__()
        self.waiting: torch.Tensor | None = None

    def forget(self) -> None:
        self.waiting = None

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Take in the frames of x [B, C, t, H, W], and return the `count` oldest frames."""
        if self.waiting is not None and self.waiting.shape[2]:
            x = torch.cat((self.waiting, x), dim=2)
        self.waiting = x[:, :, count:].clone()  # a view would keep the whole piece
        return x[:, :, :count]


class StreamedConv3d(Streaming):
    """A 3x3x3 convolution over a video in pieces, equal to that over the whole video.

    The first frame is repeated before the video: twice if `causal`, else once, and then the last frame is repeated behind.
    Rows and columns are padded by `padding_mode`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: tuple[int, int, int] = (1, 1, 1),
        causal: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate"] = "zeros",
    ):
        super().__init__()
        self.causal = causal
        self.conv = nn.Conv3d(inputs, outputs, 3, stride, padding=(0, 1, 1), padding_mode=padding_mode)
        self.tail: torch.Tensor | None = None

    def forget(self) -> None:
        self.tail = None

    def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
        """[B, C, t, H, W] -> [B, D, u, h, w], where u may be 0."""
        before = self.tail
        if before is None:
            before = x[:, :, :1].repeat(1, 1, 2 if self.causal else 1, 1, 1)
        behind = (x[:, :, -1:],) if last and not self.causal else ()
        x = torch.cat((before, x, *behind), dim=2)
        stride = self.conv.stride[0]
        count = max(0, (x.shape[2] - 3) // stride + 1)
        if x.shape[2]:  # an empty piece may come before the first frame, which is still to be repeated then
            self.tail = x[:, :, stride * count :].clone()  # a view would keep the whole piece
        if count:
            return self.conv(x)
        rows, columns = (size // step for size, step in zip(x.shape[3:], self.conv.stride[1:], strict=True))
        return x.new_empty(x.shape[0], self.conv.out_channels, 0, rows, columns)
