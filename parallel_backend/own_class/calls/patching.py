"""Conversion of latents to tokens and back, and the axis along which PipeFusion cuts bands."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange

from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import class_order

Latents = tuple[torch.Tensor, ...]
"""A model call's latents: that of the image or video, then the companion latent, if there is one."""


def latents_of(x: torch.Tensor | Latents) -> Latents:
    """A call's latents, from a single tensor or from several."""
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


def like(x: torch.Tensor | Latents, outputs: Latents) -> torch.Tensor | Latents:
    """A call's outputs, as a tensor if its latents `x` were one tensor."""
    return outputs[0] if isinstance(x, torch.Tensor) else outputs


@dataclass(frozen=True)
class Companion:
    """A second latent that a model denoises with the first, such as a video's audio (ComfyUI's nested latents).

    Its tokens are the first of the text stream: sequence ranks split them like text. The first band carries them like text:
    a call computes them once, and its later bands attend to the keys and values of this step.
    """

    pattern: str
    """einops pattern from the latent to its tokens: "b c s t -> b (s t) c"."""
    sizes: tuple[int, ...]
    """Usual shape of the companion latent, without the batch."""

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Tokens of a latent of this shape."""
        return math.prod(self._sizes(shape, 1))

    def pack(self, latent: torch.Tensor) -> torch.Tensor:
        """Latent -> tokens [B, a, c]."""
        return rearrange(latent, self.pattern)

    def unpack(self, tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens [B, a, c or wider] -> latent of this shape. Surplus channels are padding of `side_by_side`."""
        left, right = self.pattern.split(" -> ")
        sizes = dict(zip(left.split(), shape, strict=True))
        return rearrange(tokens[..., : math.prod(self._sizes(shape, 2))], f"{right} -> {left}", **sizes)

    def none_of(self, latent: torch.Tensor) -> torch.Tensor:
        """The latent with no tokens: its last token axis is empty."""
        return latent.narrow(self._axes(1)[-1], 0, 0)

    def _sizes(self, shape: tuple[int, ...], axis: int) -> list[int]:
        return [shape[each] for each in self._axes(axis)]

    def _axes(self, axis: int) -> list[int]:
        """Axes of the latent that this axis of the tokens is made of."""
        left, right = self.pattern.split(" -> ")
        groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", right)]
        return [left.split().index(name) for name in groups[axis]]


def side_by_side(image: torch.Tensor, companion: torch.Tensor) -> torch.Tensor:
    """Tokens [B, n, c] and [B, a, d] -> [B, n + a, max(c, d)], the narrower ones filled up with zeros."""
    width = max(image.shape[-1], companion.shape[-1])
    return torch.cat([F.pad(tokens, (0, width - tokens.shape[-1])) for tokens in (image, companion)], dim=1)


ROWS_PER_FRAME = 3
"""Token rows per token frame from which on bands of rows are better than bands of frames. Measured on a small video model:
with as many bands, frames are 7 dB closer to whole calls than rows, and twice the boundary costs 4 dB. So a boundary along
frames may be about three times as long."""


@dataclass(frozen=True)
class Patching:
    """Latents [B, C, H, W], of a video [B, C, T, H, W] <-> tokens [B, N, C * frames * side * side].

    Tokens are ordered with the axis that bands cut outermost, so that a band is one contiguous span of tokens. Classes order
    them by frames, rows, columns. A model's patching is for bands of rows; a run that cuts frames takes `cut("frames")`.
    """

    side: int = 2
    """Latent rows and columns of a token."""
    frames: int = 1
    """Latent frames of a token."""
    video: bool = False
    """Latents have a time axis."""
    along: str = "rows"
    """Axis that bands cut: "rows", or "frames" of a video."""
    companion: Companion | None = None
    """The second latent of a call. None: there is none."""

    def __post_init__(self):
        assert self.along in ("rows", "frames")
        assert self.video or self.along == "rows"

    def cut(self, along: str) -> "Patching":
        """The same patching for bands along this axis."""
        return self if along == self.along else replace(self, along=along)

    def best_axis(self, grid: tuple[int, ...]) -> str:
        """Axis to cut bands along: frames, unless there are more than ROWS_PER_FRAME times as many rows."""
        return "frames" if self.video and ROWS_PER_FRAME * grid[0] >= grid[1] else "rows"

    @property
    def band_dim(self) -> int:
        """Dimension of the latent that bands cut."""
        return -2 if self.along == "rows" else -3

    @property
    def band_size(self) -> int:
        """Latent rows (or frames) per token along `band_dim`."""
        return self.side if self.along == "rows" else self.frames

    def rows(self, latent: torch.Tensor, rows: Span) -> torch.Tensor:
        """Band of a latent: `rows` along `band_dim`."""
        return latent.narrow(self.band_dim, rows.start, len(rows))

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Latent shape -> numbers of tokens along (frames,) rows, columns."""
        sizes = ((self.frames,) if self.video else ()) + (self.side, self.side)
        return tuple(-(-size // by) for size, by in zip(shape[-len(sizes) :], sizes, strict=True))

    def whole(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Grid -> latent sizes [(T,) H, W], padding to whole patches included."""
        sizes = ((self.frames,) if self.video else ()) + (self.side, self.side)
        return tuple(count * by for count, by in zip(grid, sizes, strict=True))

    def row_tokens(self, grid: tuple[int, ...]) -> int:
        """Tokens per token row (or frame) along `band_dim`."""
        return torch.Size(grid).numel() // grid[self.band_dim]

    def order(self, grid: tuple[int, ...]) -> torch.Tensor | None:
        """[N]: number of a token in this order -> its number in the class's order. None: the orders are the same."""
        return class_order(grid, self.along)

    def pack(self, latent: torch.Tensor) -> torch.Tensor:
        """Latent -> tokens. Sizes that are not multiples of the patch are padded circularly, as in ComfyUI."""
        sizes = latent.shape[-3:] if self.video else (1, *latent.shape[-2:])
        latent = latent.reshape(*latent.shape[:2], *sizes)
        patch = (self.frames, self.side, self.side)
        padding = [part for size, by in zip(sizes[::-1], patch[::-1], strict=True) for part in (0, -size % by)]
        if any(padding):
            latent = F.pad(latent, padding, mode="circular")
        return rearrange(latent, self._pattern(), pt=self.frames, ph=self.side, pw=self.side)

    def unpack(self, tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens [B, N, c * ...] -> latent [B, c, *sizes of `shape`], without the padding."""
        grid = self.grid(shape)
        frames, rows, columns = grid if self.video else (1, *grid)
        left, right = self._pattern().split(" -> ")
        latent = rearrange(
            tokens, f"{right} -> {left}", t=frames, h=rows, w=columns, pt=self.frames, ph=self.side, pw=self.side
        )
        latent = latent[..., : shape[-2], : shape[-1]]
        return latent[:, :, : shape[-3]] if self.video else latent[:, :, 0]

    def companion_tokens(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Number of tokens of the companion latent in a call whose latents have these shapes."""
        return 0 if self.companion is None or len(shapes) == 1 else self.companion.tokens(shapes[1])

    def pack_all(self, latents: Latents) -> torch.Tensor:
        """Tokens of all latents, those of the companion last: see `side_by_side`."""
        tokens = self.pack(latents[0])
        if self.companion is None or len(latents) == 1:
            return tokens
        return side_by_side(tokens, self.companion.pack(latents[1]))

    def unpack_all(self, tokens: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Latents:
        """Tokens from `pack_all` -> latents of these shapes."""
        if self.companion is None or len(shapes) == 1:
            return (self.unpack(tokens, shapes[0]),)
        image, companion = tokens.split(
            (tokens.shape[1] - self.companion_tokens(shapes), self.companion_tokens(shapes)), dim=1
        )
        width = shapes[0][1] * self.frames * self.side**2
        return self.unpack(image[..., :width], shapes[0]), self.companion.unpack(companion, shapes[1])

    def band(self, latents: Latents, rows: Span) -> Latents:
        """Band of a call's latents. The first band has the whole companion latent, other bands have an empty one."""
        image, others = self.rows(latents[0], rows), latents[1:]
        if self.companion is not None and rows.start > 0:
            others = tuple(self.companion.none_of(latent) for latent in others)
        return image, *others

    def join(self, bands: Sequence[Latents]) -> Latents:
        """Latents of all bands, in order -> latents of the whole call."""
        return torch.cat([band[0] for band in bands], dim=self.band_dim), *bands[0][1:]

    def usual(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes of a call's latents, the first with this shape and the companion of its usual sizes."""
        return [shape] if self.companion is None else [shape, (shape[0], *self.companion.sizes)]

    def _pattern(self) -> str:
        order = "h t w" if self.along == "rows" else "t h w"
        return f"b c (t pt) (h ph) (w pw) -> b ({order}) (c pt ph pw)"
