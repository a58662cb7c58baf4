"""Videos of one handwritten digit that moves through the frame, their prompts, and whether they show what was asked.

Spaces: videos [B, 8, 128, 64] in 0..1, ink is 1; model space [B, 16, 8, 16, 8], what the transformer is trained in: the
quickstart's fixed codec, frame by frame. A token of Wan (1 x 2 x 2) is a square of 16 pixels in one frame: 8 x 8 x 4 tokens,
as many frames as rows, so that bands along either have the same size.

A digit starts anywhere, moves by one token in each frame, and comes in again on the other side: Wan knows only how far
apart tokens are, not where they are, so a path through the middle of the frame is hard to learn for so small a model.
"""

from functools import cache

import torch
import torch.nn.functional as F

from parallel_backend.quickstart import codec
from scripts.digits import CELL, compose, load_scans, read_digits
from scripts.digits import DIGIT as CELL_DIGIT

FRAMES, HEIGHT, WIDTH = 8, 128, 64
LATENT = (codec.CHANNELS, FRAMES, HEIGHT // codec.BLOCK, WIDTH // codec.BLOCK)
STEP = 16  # pixels per frame, and between two places to start from: the side of a token
DIGIT = 48  # pixels that the 8x8 scan covers
STYLES = 3  # real scans of each digit, the data set's first ones: half an hour of half a core is enough for them

DIRECTIONS = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""(rows, columns) of one step: up, right, down, left."""

NULL_DIGIT, FIRST_DIRECTION = 10, 11
NULL_DIRECTION = FIRST_DIRECTION + len(DIRECTIONS)
CONTEXT_WIDTH = NULL_DIRECTION + 1
TOKEN_SCALE = 4.0  # the norm of a vector of unit variance of that width


def encode_prompts(prompts: torch.Tensor) -> torch.Tensor:
    """Digit (0..9) and direction (0..3) [B, 2] int64 -> text tokens [B, 2, 16]; a row of -1 is the unconditional prompt."""
    null = torch.tensor([NULL_DIGIT, NULL_DIRECTION])
    symbols = torch.where(prompts < 0, null, prompts + torch.tensor([0, FIRST_DIRECTION]))
    return F.one_hot(symbols, CONTEXT_WIDTH).float() * TOKEN_SCALE


@cache
def _pictures() -> torch.Tensor:
    """The scans that are used, enlarged: [10, STYLES, DIGIT, DIGIT] float32 in 0..1."""
    scans = load_scans()
    chosen = torch.cat([scans.images[scans.labels == digit][:STYLES] for digit in range(10)])
    large = F.interpolate(chosen[:, None], size=(DIGIT, DIGIT), mode="bicubic")[:, 0].clamp(0, 1)
    # A smoothstep turns the blur of the enlargement into strokes with soft edges.
    return (large * large * (3 - 2 * large)).view(10, STYLES, DIGIT, DIGIT)


def _moved(frame: torch.Tensor, direction: int, start: tuple[int, int], back: bool = False) -> torch.Tensor:
    """[FRAMES, H, W]: a frame, or each of FRAMES, moved from the corner to where the digit is. `back`: the other way."""
    rows, columns = DIRECTIONS[direction]
    frames = frame.expand(FRAMES, HEIGHT, WIDTH)
    sign = -STEP if back else STEP
    shifts = [(sign * (start[0] + time * rows), sign * (start[1] + time * columns)) for time in range(FRAMES)]
    return torch.stack([each.roll(shift, (0, 1)) for each, shift in zip(frames, shifts, strict=True)])


def sample_videos(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random videos [B, FRAMES, HEIGHT, WIDTH] of real digits, and their prompts [B, 2] int64."""
    prompts = random_prompts(count, generator)
    styles = torch.randint(STYLES, (count,), generator=generator)
    places = torch.stack([torch.randint(side // STEP, (count,), generator=generator) for side in (HEIGHT, WIDTH)], 1)
    videos = []
    for (digit, direction), style, start in zip(prompts.tolist(), styles.tolist(), places.tolist(), strict=True):
        corner = F.pad(_pictures()[digit, style], (0, WIDTH - DIGIT, 0, HEIGHT - DIGIT))
        videos.append(_moved(corner, direction, start))
    return torch.stack(videos), prompts


def random_prompts(count: int, generator: torch.Generator) -> torch.Tensor:
    """[count, 2] int64."""
    digits = torch.randint(10, (count,), generator=generator)
    return torch.stack((digits, torch.randint(len(DIRECTIONS), (count,), generator=generator)), 1)


def encode(videos: torch.Tensor) -> torch.Tensor:
    """Videos -> model space, float32."""
    frames = codec.process_in(codec.encode(videos.flatten(0, 1)))
    return frames.unflatten(0, (-1, FRAMES)).transpose(1, 2)


def decode(latents: torch.Tensor) -> torch.Tensor:
    """Model space -> videos float32, clamped to 0..1."""
    frames = codec.decode(codec.process_out(latents.transpose(1, 2).flatten(0, 1)))
    return frames.unflatten(0, (-1, FRAMES))


def read_videos(videos: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Which frames show the digit asked for where the direction asked for has it: bool [B, FRAMES].

    The path is the one with most ink; the quickstart's reader sees a window around it, so a digit elsewhere is not read.
    """
    cells = []
    for video, direction in zip(videos, prompts[:, 1].tolist(), strict=True):
        still = _moved(video, direction, (0, 0), back=True)  # now the digit should stand where it started
        ink = F.pad(still.mean(0)[None], (0, DIGIT - STEP, 0, DIGIT - STEP), mode="circular")
        column, row = divmod(F.avg_pool2d(ink, DIGIT, STEP)[0].T.argmax().item(), HEIGHT // STEP)
        digits = still.roll((-STEP * row, -STEP * column), (1, 2))[:, :DIGIT, :DIGIT]
        size = CELL_DIGIT
        cell = F.interpolate(digits[:, None], size=(size, size), mode="bilinear")[:, 0]
        cells.append(F.pad(cell, [(CELL - size) // 2] * 4))
    read = torch.from_numpy(read_digits(compose(torch.cat(cells).unflatten(0, (-1, 4))))).view(-1, FRAMES)
    return read == prompts[:, :1]
