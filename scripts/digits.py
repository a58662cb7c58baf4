"""Pictures of 2x2 handwritten digits made from scikit-learn's `load_digits`, and a classifier that reads them back.

scikit-learn is imported inside the functions: training and tests need it, the nodes do not.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from parallel_backend.client.sampling import Prompt
from parallel_backend.quickstart.prompt import BLANK, CELLS, NULL, encode_symbols

CELL = 128  # pixels; a picture is 2x2 cells
DIGIT = 112  # pixels that the 8x8 scan covers before jitter: a margin of half a scan pixel on each side
SHIFT = 4.0  # jitter, pixels
SCALE = 0.06  # jitter, relative

READER_SIZE = 16  # side in pixels of a cell as the classifier sees it
READER_COPIES = 4  # jittered renderings of each real digit that the reader learns from
READER_SEED = 7
BLANK_INK = 0.02  # mean brightness below which a cell counts as blank; the faintest real digit has 0.15


class Scans(NamedTuple):
    """`images` [N, 8, 8] float32 in 0..1 (ink is 1), `labels` [N] int64."""

    images: torch.Tensor
    labels: torch.Tensor


@cache
def load_scans() -> Scans:
    """The 1,797 real digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Scans(torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target).long())


@cache
def split_scans() -> tuple[Scans, Scans]:
    """The reader's training split and its held-out test split (25 %), stratified by label."""
    from sklearn.model_selection import train_test_split

    scans = load_scans()
    train, test = train_test_split(
        np.arange(len(scans.labels)), test_size=0.25, random_state=READER_SEED, stratify=scans.labels
    )
    return Scans(scans.images[train], scans.labels[train]), Scans(scans.images[test], scans.labels[test])


def render(scans_N88: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Scans [N, 8, 8] in 0..1 -> cells [N, 128, 128] float32 in 0..1; jittered if a generator is given."""
    count = scans_N88.shape[0]
    draw = torch.zeros(count, 3) if generator is None else torch.rand(count, 3, generator=generator) * 2 - 1
    zoom = CELL / (DIGIT * (1 + SCALE * draw[:, 0]))
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = zoom
    theta[:, :, 2] = draw[:, 1:] * (2 * SHIFT / CELL) * zoom[:, None]
    grid = F.affine_grid(theta, [count, 1, CELL, CELL], align_corners=False)
    cells = F.grid_sample(scans_N88[:, None], grid, mode="bicubic", padding_mode="zeros", align_corners=False)
    cells = cells[:, 0].clamp(0, 1)
    # A smoothstep turns the blur of the 16-fold enlargement into strokes with soft edges.
    return cells * cells * (3 - 2 * cells)


def compose(cells_BC: torch.Tensor) -> torch.Tensor:
    """Cells [B, 4, 128, 128] -> pictures [B, 256, 256]."""
    rows = cells_BC.unflatten(1, (2, 2))
    return rows.permute(0, 1, 3, 2, 4).reshape(-1, 2 * CELL, 2 * CELL)


def split_cells(images: torch.Tensor) -> torch.Tensor:
    """Pictures [B, 256, 256] -> cells [B, 4, 128, 128]; inverse of `compose`."""
    rows = images.reshape(-1, 2, CELL, 2, CELL)
    return rows.permute(0, 1, 3, 2, 4).flatten(1, 2)


def sample_pictures(count: int, generator: torch.Generator, blank_share: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pictures [B, 256, 256] float32 in 0..1 and their symbols [B, 4] int64 (digits, or BLANK)."""
    scans = load_scans()
    symbols = torch.randint(10, (count, CELLS), generator=generator)
    # First the label, then a scan of that label: all digits are equally frequent.
    order = torch.argsort(scans.labels, stable=True)
    sizes = torch.bincount(scans.labels, minlength=10)
    starts = sizes.cumsum(0) - sizes
    pick = (torch.rand(count, CELLS, generator=generator) * sizes[symbols]).long()
    chosen = order[starts[symbols] + pick]
    cells = render(scans.images[chosen.flatten()], generator).unflatten(0, (count, CELLS))
    blank = torch.rand(count, CELLS, generator=generator) < blank_share
    cells[blank] = 0
    return compose(cells), symbols.masked_fill(blank, BLANK)


def _features(cells: torch.Tensor) -> np.ndarray:
    """Cells [N, 128, 128] -> [N, 256] float32 for the classifier."""
    return F.adaptive_avg_pool2d(cells[:, None].float(), READER_SIZE).flatten(1).numpy()


@cache
def _reader():
    """A support vector classifier of jittered renderings of the real digits; it never sees a generated one."""
    from sklearn.svm import SVC

    train, _ = split_scans()
    generator = torch.Generator().manual_seed(READER_SEED)
    copies = Scans(train.images.repeat(READER_COPIES, 1, 1), train.labels.repeat(READER_COPIES))
    return SVC(C=10.0, gamma="scale").fit(_features(render(copies.images, generator)), copies.labels.numpy())


def read_digits(images: torch.Tensor) -> np.ndarray:
    """Pictures [B, 256, 256] in 0..1 -> the symbols read, int64 [B, 4] in reading order; BLANK for an empty cell."""
    cells = split_cells(images.detach().cpu()).flatten(0, 1)
    read = _reader().predict(_features(cells)).astype(np.int64)
    read[cells.mean((1, 2)).numpy() < BLANK_INK] = BLANK
    return read.reshape(-1, CELLS)


def digit_prompts(symbols_BC: torch.Tensor, cfg: float) -> Prompt:
    """Prompts of the bundled model for symbols [B, 4], with the unconditional prompt as negative."""
    context, pooled = encode_symbols(symbols_BC)
    no_context, no_pooled = encode_symbols(torch.full((len(symbols_BC), CELLS), NULL))
    return Prompt({"context": context, "pooled": pooled}, {"context": no_context, "pooled": no_pooled}, cfg)
