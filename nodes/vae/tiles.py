"""Runs VAEs that are made for tiles (MiniMax H3): ComfyUI's class cuts and blends the tiles, the ranks compute them."""

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

RunTiles = Callable[[Iterator[torch.Tensor]], Generator[torch.Tensor, None, None]]
"""Function from the tiles of each clip to the computed tiles of each clip: RemoteVAE.run_tiles."""


def decode_in_tiles(
    model: "MiniMaxH3VideoVAE", latent: torch.Tensor, output: torch.Tensor, run_tiles: RunTiles, on_clip: Callable[[], None]
) -> None:
    """`model.decode` of a latent [1, C, frames, rows, columns] into `output`, with its tiles run by the ranks.

    `on_clip` is called after each of `latent_clips`.
    """
    scaled = latent * model.latents_std.view(1, -1, 1, 1, 1).to(latent) + model.latents_mean.view(1, -1, 1, 1, 1).to(latent)
    clips = (tiles_of(model, clip, model.vae_ratio) for clip in latent_clips(model, scaled))
    with _with_tiles(model, run_tiles(clips), on_clip) as tiled:
        tiled.decode(latent, output_buffer=output)


def encode_in_tiles(
    model: "MiniMaxH3VideoVAE", pixels: torch.Tensor, run_tiles: RunTiles, on_clip: Callable[[], None]
) -> torch.Tensor:
    """`model.encode` of pixels [1, 3, frames, rows, columns]. `on_clip` is called after each of `pixel_clips`."""
    clips = (tiles_of(model, model._normalize_pixels(clip), 1) for clip in pixel_clips(model, pixels))
    with _with_tiles(model, run_tiles(clips), on_clip) as tiled:
        return tiled.encode(pixels)


def latent_clips(model: "MiniMaxH3VideoVAE", latent: torch.Tensor) -> list[torch.Tensor]:
    """Return the clips of frames that ComfyUI's decode_temporal decodes one after the other."""
    if latent.shape[2] == 1:
        return [latent]
    padding, clips = model._decode_temporal_chunks(latent.shape[2])
    padded = torch.cat([latent, latent[:, :, -1:].repeat(1, 1, padding, 1, 1)], dim=2)
    step, length = model.tokens_chunk_size, model.tokens_chunk_size + model.token_overlap
    return [padded[:, :, clip * step : clip * step + length] for clip in range(clips)]


def pixel_clips(model: "MiniMaxH3VideoVAE", pixels: torch.Tensor) -> list[torch.Tensor]:
    """Return the clips of frames that ComfyUI's encode_temporal encodes one after the other."""
    if pixels.shape[2] == 1:
        return [pixels]
    *clips, last = pixels.split(model.clip_length, dim=2)
    missing = model.clip_length - last.shape[2]
    return [*clips, torch.cat([last, last[:, :, -1:].repeat(1, 1, missing, 1, 1)], dim=2)]


def tile_shape(model: "MiniMaxH3VideoVAE", shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of one tile of a latent of this shape."""
    frames = min(shape[2], model.tokens_chunk_size + model.token_overlap)
    return (1, shape[1], frames, *(min(size, model.tile_size // model.vae_ratio) for size in shape[3:]))


def tiles_of(model: "MiniMaxH3VideoVAE", clip: torch.Tensor, ratio: int) -> torch.Tensor:
    """[1, C, frames, rows, columns] -> [tiles, C, frames, rows, columns] in the order in which ComfyUI visits the tiles.

    `ratio`: rows of pixels for each row of the clip.
    """
    rows, columns = (
        [slice(start // ratio, (start + length) // ratio) for start, length in zip(starts, lengths, strict=True)]
        for starts, lengths, _overlaps in (model.split_tiles(size * ratio) for size in clip.shape[-2:])
    )
    return torch.cat([clip[..., row, column] for row in rows for column in columns])


@contextlib.contextmanager
def _with_tiles(
    model: "MiniMaxH3VideoVAE", clips: Generator[torch.Tensor, None, None], on_clip: Callable[[], None]
) -> Iterator["MiniMaxH3VideoVAE"]:
    """A copy of ComfyUI's model that takes computed tiles from `clips` instead of computing them.

    `clips`: for each clip its tiles [tiles, C, frames, rows, columns], in the order in which the model asks for them. They
    are closed at the end, because the model does not ask for a clip after the last one. Then the ranks free their memory.
    """
    copied = copy.copy(model)
    tiles: Iterator[torch.Tensor] = iter(())

    def computed(asked: torch.Tensor) -> torch.Tensor:
        return torch.cat([next(tiles) for _ in asked])

    def clip_by_clip(blend: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(clip: torch.Tensor) -> torch.Tensor:
            nonlocal tiles
            tiles = iter(next(clips).float().split(1))
            blended = blend(clip)
            on_clip()
            return blended

        return run

    # Instance attributes of the copy: its `tiled_decode` and `tiled_encode` call the copy's functions for some tiles.
    copied._decode_pixels = copied._encode_moments = computed
    copied.tiled_decode, copied.tiled_encode = clip_by_clip(copied.tiled_decode), clip_by_clip(copied.tiled_encode)
    with contextlib.closing(clips):
        try:
            yield copied
        finally:
            del copied.tiled_decode, copied.tiled_encode  # they refer to the copy, which would wait for garbage collection
