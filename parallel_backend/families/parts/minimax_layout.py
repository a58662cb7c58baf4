"""Positions of MiniMax H3's tokens: of video and sound, and of references and keyframes, whose tokens are made here too.

A position is (time, row, column), as in ComfyUI's native model (comfy/ldm/minimax/model.py). In time, words come first, one
each, then references, each for its duration, then video and sound at once. Rows and columns span a square of 32 with the
picture's area. Computed in float64 and rounded to float32 at the end.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange

from parallel_backend.core.spans import Span

from ..base.patching import Companion, Patching
from ..base.segments import SOUND, VIDEO, CallTokens, Segment

FRAMES = (1, 4, 4, 4, 4)
"""Pictures in each of a video's latent frames. The pattern repeats."""
PER_FRAME = 5.0 / 3.0
"""Time of a picture. A frame of sound takes 1."""
CHANNELS = 2
"""Stereo channels. Tokens of the left one precede those of the right one."""
SOUND_CHANNELS = 32
"""Channels of the sound's latent."""
VISUAL_TIME, SOUND_TIME = 0.999, 1.0
"""Times at which references are mixed with noise, from noise (0) to clean (1)."""


def thirds(frames: int) -> int:
    """Duration of a video of so many latent frames, in thirds of a unit of time: an integer."""
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
    """Positions of the token rows, and of the token columns, float64."""
    area = math.sqrt(4 * rows * columns)

    def side(count: int) -> torch.Tensor:
        share = 2 * count / area
        return (torch.arange(count, dtype=torch.float64) * (share / count) + (1.0 - share) / 2.0) * 32.0

    return side(rows), side(columns)


def frame_times(count: int) -> torch.Tensor:
    """Times [count] of a video's latent frames, from its beginning, float64."""
    spans = torch.tensor([0, *(PER_FRAME * FRAMES[frame % len(FRAMES)] for frame in range(count - 1))], dtype=torch.float64)
    return spans.cumsum(0)


def video_places(start: float, grid: tuple[int, ...]) -> torch.Tensor:
    """Positions [frames * rows * columns, 3] of a video that begins at time `start`, in this order."""
    frames, rows, columns = grid
    down, right = frame_sides(rows, columns)
    return torch.cartesian_prod(start + frame_times(frames), down, right)


def sound_places(start: float, frames: int, columns: torch.Tensor) -> torch.Tensor:
    """Positions [channels * frames, 3]. The stereo channels are at the first and last of `columns`, those of their video."""
    places = torch.zeros(CHANNELS, frames, 3, dtype=torch.float64)
    places[:, :, 0] = start + torch.arange(frames, dtype=torch.float64)
    places[0, :, 2], places[1, :, 2] = columns[0], columns[-1]
    return places.flatten(0, 1)


def segments(call: CallTokens) -> list[Segment]:
    """ComfyUI's order: text, keyframes and references, sound, video."""
    runs = [Span(start, end).shift(call.image) for start, end in call.references]
    return [
        Segment(Span(call.companion, call.text), of_image=False),
        *(Segment(run, of_image=True) for run in runs),
        Segment(Span(0, call.companion), of_image=False, kind=SOUND),
        Segment(Span(0, call.image), of_image=True, kind=VIDEO),
    ]


@dataclass
class References:
    """Collects tokens of keyframes and references, their positions and which are sound. `width`: channels of a token."""

    width: int
    visual_time: float
    sound_time: float
    seed: int
    tokens: list[torch.Tensor] = field(default_factory=list)
    places: list[torch.Tensor] = field(default_factory=list)
    sound: list[torch.Tensor] = field(default_factory=list)

    def add_video(self, latent: torch.Tensor, start: float) -> None:
        """Latent [1, C, T, H, W]. ValueError for other channels, and for sides that are no whole number of tokens."""
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
        """Latent [1, C, 2, T]. ValueError for other channels."""
        if latent.ndim != 4 or latent.shape[1:3] != (SOUND_CHANNELS, CHANNELS):
            raise ValueError(
                f"positive, negative: a reference's sound has a latent of the shape {list(latent.shape)}, this model takes "
                f"{SOUND_CHANNELS} channels in stereo. Encode it with the model's own audio VAE."
            )
        rows = rearrange(latent[:1].float(), "b c s t -> (b s t) c")
        self._add(rows, self.sound_time, self.seed + 1, sound_places(start, latent.shape[-1], columns), 1)

    def _add(self, rows: torch.Tensor, time: float, seed: int, places: torch.Tensor, sound: int) -> None:
        if time < 1.0:  # as in ComfyUI, every reference gets noise from the same seed
            noise = torch.randn(rows.shape, generator=torch.Generator("cpu").manual_seed(seed))
            rows = time * rows + (1.0 - time) * noise.to(rows.device)
        self.tokens.append(torch.nn.functional.pad(rows, (0, self.width - rows.shape[-1])).cpu())
        self.places.append(places.float())
        self.sound.append(torch.full((len(rows),), sound))


def place_references(payload: Mapping[str, Any], words: int, grid: tuple[int, ...], references: References) -> int:
    """Adds the payload's references and keyframes to `references`. Returns the video's start, in thirds."""
    now, columns = 3 * words, frame_sides(*grid[1:])[1]
    for block in payload.get("refs") or ():
        kind, start, sound = block["kind"], now / 3, block.get("audio_latent")
        sound_column, lasts = columns, 3
        if kind in ("video", "video_audio"):
            sound_column = frame_sides(block["latent_h"] // 2, block["latent_w"] // 2)[1]
        if kind != "image":
            lasts = max(3 * block["ref_audio_t"], thirds(block["latent_t"]) if "latent_t" in block else 0)
            if block["ref_audio_t"]:
                references.add_sound(sound, start, sound_column)
        if kind != "audio":
            references.add_video(block["latent"], start)
        now += lasts
    for frame in payload.get("keyframes") or ():
        start = now / 3 + PER_FRAME * frame["resolved_frame_index"]
        if frame.get("latent") is not None:
            references.add_video(frame["latent"], start)
        if frame.get("audio_latent") is not None:
            references.add_sound(frame["audio_latent"], start, columns)
    return now
