"""How latents become tokens and back, and along which of their axes PipeFusion cuts bands."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange

from parallel_backend.core.spans import Span
from parallel_backend.core.token_order import class_order


@dataclass(frozen=True)
class Patching:
    """Latents [B, C, H, W], of a video [B, C, T, H, W] <-> tokens [B, N, C * frames * side * side].

    The axis that bands cut is the outermost one of our tokens. diffusers' classes count frames, rows, columns. A family says
    how its latents become tokens, a run along which axis: `cut`.
    """

    side: int = 2
    """Latent rows and columns of a token."""

    frames: int = 1
    """Latent frames of a token."""

    video: bool = False
    """Latents have a time axis."""

    along: str = "rows"
    """Axis that bands cut: "rows", or "frames" of a video."""

    def __post_init__(self):
        assert self.along in ("rows", "frames")
        assert self.video or self.along == "rows"

    def cut(self, along: str) -> "Patching":
        """The same for a run in bands along this axis."""
        return self if along == self.along else replace(self, along=along)

    def best_axis(self, grid: tuple[int, ...]) -> str:
        """Axis to cut bands along: the longer one. Its bands touch in fewer tokens, and there can be more of them."""
        return "frames" if self.video and grid[0] > grid[1] else "rows"

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
        """Latent shape -> tokens along (frames,) rows, columns."""
        sizes = ((self.frames,) if self.video else ()) + (self.side, self.side)
        return tuple(-(-size // by) for size, by in zip(shape[-len(sizes) :], sizes, strict=True))

    def whole(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Latent sizes [(T,) H, W] of a whole grid, padding included."""
        sizes = ((self.frames,) if self.video else ()) + (self.side, self.side)
        return tuple(count * by for count, by in zip(grid, sizes, strict=True))

    def row_tokens(self, grid: tuple[int, ...]) -> int:
        """Tokens per token row (or frame) along `band_dim`."""
        return torch.Size(grid).numel() // grid[self.band_dim]

    def order(self, grid: tuple[int, ...]) -> torch.Tensor | None:
        """See class_order."""
        return class_order(grid, self.along)

    def pack(self, latent: torch.Tensor) -> torch.Tensor:
        """Latent -> tokens. Sizes that are no whole number of patches are padded circularly, as ComfyUI does."""
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

    def _pattern(self) -> str:
        order = "h t w" if self.along == "rows" else "t h w"
        return f"b c (t pt) (h ph) (w pw) -> b ({order}) (c pt ph pw)"
