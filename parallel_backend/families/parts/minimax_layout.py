"""MiniMax H3's places: of the video's and the sound's tokens, and of references and keyframes with their tokens.

A place is (time, row, column), counted as ComfyUI's native model counts it (comfy/ldm/minimax/model.py): words follow each
other in time, then references, each as long as it lasts, then video and sound side by side. Rows and columns are of a
square of 32 with the picture's area. All of it is exact in float64, and float32 in the end.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange

from parallel_backend.families.base.patching import Companion, Patching

FRAMES = (1, 4, 4, 4, 4)
"""Pictures in a video's latent frames, again and again."""
PER_FRAME = 5.0 / 3.0
"""Time of a picture. A frame of sound takes 1."""
CHANNELS = 2
"""Left and right: tokens of the sound are the first one's, then the second's."""
SOUND_CHANNELS = 32
"""Of the sound's latent."""
VISUAL_TIME, SOUND_TIME = 0.999, 1.0
"""How clean a reference is: from noise (0) to itself (1)."""


def thirds(frames: int) -> int:
    """How long a video of so many latent frames lasts, in thirds."""
    return 5 * sum(FRAMES[frame % len(FRAMES)] for frame in range(frames))


PATCHING = Patching(
    video=True,
    companion=Companion(
        "b c s t -> b (s t) c",
        lambda frames: (SOUND_CHANNELS, CHANNELS, round(thirds(frames) / 3)),
        required=True,
    ),
)


def frame_sides(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of token rows and of token columns."""
    area = math.sqrt(4 * rows * columns)

    def side(count: int) -> torch.Tensor:
        share = 2 * count / area
        return (torch.arange(count, dtype=torch.float64) * (share / count) + (1.0 - share) / 2.0) * 32.0

    return side(rows), side(columns)


def frame_times(count: int) -> torch.Tensor:
    """Times of a video's latent frames, from its beginning."""
    spans = torch.tensor([0, *(PER_FRAME * FRAMES[frame % len(FRAMES)] for frame in range(count - 1))], dtype=torch.float64)
    return spans.cumsum(0)


def video_places(start: float, grid: tuple[int, int, int]) -> torch.Tensor:
    """[frames * rows * columns, 3], in this order."""
    frames, rows, columns = grid
    down, right = frame_sides(rows, columns)
    return torch.cartesian_prod(start + frame_times(frames), down, right)


def sound_places(start: float, frames: int, columns: torch.Tensor) -> torch.Tensor:
    """[channels * frames, 3]: the channels are at the ends of the `columns` of the video that they belong to."""
    places = torch.zeros(CHANNELS, frames, 3, dtype=torch.float64)
    places[:, :, 0] = start + torch.arange(frames, dtype=torch.float64)
    places[0, :, 2], places[1, :, 2] = columns[0], columns[-1]
    return places.flatten(0, 1)


@dataclass
class References:
    """Tokens of keyframes and references, one behind the other. `width`: channels of a token."""

    width: int
    visual_time: float
    sound_time: float
    seed: int

    def __post_init__(self):
        self.tokens: list[torch.Tensor] = []
        self.places: list[torch.Tensor] = []
        self.sound: list[torch.Tensor] = []

    def add_video(self, latent: torch.Tensor, start: float) -> None:
        """[1, C, T, H, W]. ValueError for another model's, and for sides that are no whole number of tokens."""
        height, width = latent.shape[-2:]
        if latent.ndim != 5 or 4 * latent.shape[1] != self.width or height % 2 or width % 2:
            raise ValueError(
                f"positive, negative: a keyframe's or reference's latent is {list(latent.shape)}, this model takes "
                f"{self.width // 4} channels and even sides. Encode it with the model's own VAE, at multiples of 32 pixels."
            )
        rows = rearrange(latent[:1].float(), "b c t (h p) (w q) -> (b t h w) (c p q)", p=2, q=2)
        places = video_places(start, (latent.shape[2], height // 2, width // 2))
        self._add(rows, self.visual_time, self.seed, places, 0)

    def add_sound(self, latent: torch.Tensor, start: float, columns: torch.Tensor) -> None:
        """[1, C, 2, T]. ValueError for another model's."""
        if latent.ndim != 4 or latent.shape[1:3] != (SOUND_CHANNELS, CHANNELS):
            raise ValueError(
                f"positive, negative: a reference's sound has a latent of the shape {list(latent.shape)}, this model takes "
                f"{SOUND_CHANNELS} channels in stereo. Encode it with the model's own audio VAE."
            )
        rows = rearrange(latent[:1].float(), "b c s t -> (b s t) c")
        self._add(rows, self.sound_time, self.seed + 1, sound_places(start, latent.shape[-1], columns), 1)

    def _add(self, rows: torch.Tensor, time: float, seed: int, places: torch.Tensor, sound: int) -> None:
        if time < 1.0:  # every one of them begins the same noise anew
            noise = torch.randn(rows.shape, generator=torch.Generator("cpu").manual_seed(seed))
            rows = time * rows + (1.0 - time) * noise.to(rows.device)
        self.tokens.append(torch.nn.functional.pad(rows, (0, self.width - rows.shape[-1])).cpu())
        self.places.append(places.float())
        self.sound.append(torch.full((len(rows),), sound))


def place_references(payload: Mapping[str, Any], words: int, grid: tuple[int, int, int], found: References) -> int:
    """Adds those of ComfyUI's `payload` to `found`; when the video begins, in thirds."""
    now, columns = 3 * words, frame_sides(*grid[1:])[1]
    for block in payload.get("refs") or ():
        kind, start, sound = block["kind"], now / 3, block.get("audio_latent")
        sound_column, lasts = columns, 3
        if kind in ("video", "video_audio"):
            sound_column = frame_sides(block["latent_h"] // 2, block["latent_w"] // 2)[1]
        if kind != "image":
            lasts = max(3 * block["ref_audio_t"], thirds(block["latent_t"]) if "latent_t" in block else 0)
            if block["ref_audio_t"]:
                found.add_sound(sound, start, sound_column)
        if kind != "audio":
            found.add_video(block["latent"], start)
        now += lasts
    for frame in payload.get("keyframes") or ():
        start = now / 3 + PER_FRAME * frame["resolved_frame_index"]
        if frame.get("latent") is not None:
            found.add_video(frame["latent"], start)
        if frame.get("audio_latent") is not None:
            found.add_sound(frame["audio_latent"], start, columns)
    return now
