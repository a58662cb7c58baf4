"""Converts latents to tokens and back, along the axis that PipeFusion cuts into bands."""

import functools
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
"""A model call's latents: the image or video, then the companion latent (audio) if there is one."""


def latents_of(x: torch.Tensor | Latents) -> Latents:
    """Return a call's latents as a tuple."""
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


def like(x: torch.Tensor | Latents, outputs: Latents) -> torch.Tensor | Latents:
    """Return a call's outputs, as a tensor if its latents `x` were a single tensor."""
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
        """Return the tokens of a latent of this shape."""
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
        """Return the latent with no tokens: its last token axis is empty."""
        return latent.narrow(self._axes(1)[-1], 0, 0)

    def _sizes(self, shape: tuple[int, ...], axis: int) -> list[int]:
        return [shape[each] for each in self._axes(axis)]

    def _axes(self, axis: int) -> list[int]:
        """Return the latent's axes that make up this axis of the tokens."""
        left, right = self.pattern.split(" -> ")
        groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", right)]
        return [left.split().index(name) for name in groups[axis]]


def side_by_side(image: torch.Tensor, companion: torch.Tensor) -> torch.Tensor:
    """Tokens [B, n, c] and [B, a, d] as [B, n + a, max(c, d)]. The narrower ones are filled up with zeros."""
    width = max(image.shape[-1], companion.shape[-1])
    return torch.cat([F.pad(tokens, (0, width - tokens.shape[-1])) for tokens in (image, companion)], dim=1)


ROWS_PER_FRAME = 3
"""If a token frame has at least this many token rows, bands of rows are better than bands of frames.

Measured on a small video model: with equally many bands, bands of frames are 7 dB closer to exact calls than bands of rows.
A boundary twice as long costs 4 dB. So a boundary along frames may be about three times as long."""


@dataclass(frozen=True)
class Patching:
    """How latents [B, C, H, W], or [B, C, T, H, W] of a video, become tokens [B, N, C * frames * side * side].

    The axis that bands cut is the outermost one, so a band is one contiguous span of tokens. Classes order tokens by frames,
    rows, columns. A model's patching is for bands of rows; a run with bands of frames uses `cut("frames")`.
    """

    side: int = 2
    """Latent rows, and latent columns, of a token."""
    frames: int = 1
    """Latent frames of a token."""
    video: bool = False
    """Whether latents have a time axis."""
    along: str = "rows"
    """The axis that bands cut: "rows", or "frames" of a video."""
    companion: Companion | None = None
    """The second latent of a call. None: calls have one latent."""

    def __post_init__(self):
        assert self.along in ("rows", "frames")
        assert self.video or self.along == "rows"

    def cut(self, along: str) -> "Patching":
        """Return the same patching for bands along this axis."""
        return self if along == self.along else replace(self, along=along)

    def best_axis(self, grid: tuple[int, ...]) -> str:
        """Return the better axis for bands: "frames", unless a frame has more than ROWS_PER_FRAME times as many rows as
        there are frames."""
        return "frames" if self.video and ROWS_PER_FRAME * grid[0] >= grid[1] else "rows"

    @property
    def axes(self) -> int:
        """Number of axes of a latent."""
        return 5 if self.video else 4

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
        """Return latent shape -> numbers of tokens along (frames,) rows, columns."""
        sizes = ((self.frames,) if self.video else ()) + (self.side, self.side)
        return tuple(-(-size // by) for size, by in zip(shape[-len(sizes) :], sizes, strict=True))

    def whole(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the latent sizes [(T,) H, W] of a grid of tokens, including the padding to whole tokens."""
        sizes = ((self.frames,) if self.video else ()) + (self.side, self.side)
        return tuple(count * by for count, by in zip(grid, sizes, strict=True))

    def row_tokens(self, grid: tuple[int, ...]) -> int:
        """Return the tokens per token row (or frame) along `band_dim`."""
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
        return rearrange(latent, " -> ".join(self._patterns), pt=self.frames, ph=self.side, pw=self.side)

    def unpack(self, tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens [B, N, c * ...] -> latent [B, c, *sizes of `shape`], without the padding."""
        grid = self.grid(shape)
        frames, rows, columns = grid if self.video else (1, *grid)
        pattern = " -> ".join(reversed(self._patterns))
        latent = rearrange(tokens, pattern, t=frames, h=rows, w=columns, pt=self.frames, ph=self.side, pw=self.side)
        latent = latent[..., : shape[-2], : shape[-1]]
        return latent[:, :, : shape[-3]] if self.video else latent[:, :, 0]

    def companion_tokens(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the number of tokens of the companion latent in a call whose latents have these shapes."""
        return 0 if self.companion is None or len(shapes) == 1 else self.companion.tokens(shapes[1])

    def pack_all(self, latents: Latents) -> torch.Tensor:
        """Return the tokens of all latents; the companion's come last, see `side_by_side`."""
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
        """The latents of one band. The first band has the whole companion latent, the other bands have an empty one."""
        image, others = self.rows(latents[0], rows), latents[1:]
        if self.companion is not None and rows.start > 0:
            others = tuple(self.companion.none_of(latent) for latent in others)
        return image, *others

    def join(self, bands: Sequence[Latents]) -> Latents:
        """Return the whole call's latents, from those of all bands in order."""
        return torch.cat([band[0] for band in bands], dim=self.band_dim), *bands[0][1:]

    def usual(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of a call's latents for a first latent of this shape. The companion, if there is one, has its
        usual sizes."""
        return [shape] if self.companion is None else [shape, (shape[0], *self.companion.sizes)]

    @functools.cached_property
    def _patterns(self) -> tuple[str, str]:
        """einops patterns of a latent and of its tokens."""
        order = "h t w" if self.along == "rows" else "t h w"
        return "b c (t pt) (h ph) (w pw)", f"b ({order}) (c pt ph pw)"
