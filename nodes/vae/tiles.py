"""VAEs that are made for tiles (MiniMax H3): ComfyUI's own class cuts and blends them, the ranks run them."""

import copy
from collections.abc import Callable, Iterator

import torch

from parallel_backend.client.vae import RemoteVAE
from parallel_backend.processes.pool import Poll
from parallel_backend.vaes import minimax_h3


def why_no_tiles(model: torch.nn.Module) -> str | None:
    """In words that follow 'since'."""
    if (model.vae_ratio, model.vae_ratio_t) != (minimax_h3.SCALE, minimax_h3.FRAMES):
        return "its VAE has other scales than MiniMax H3's"
    return None if model.tiling else "this VAE's tiling is switched off"


def decode_in_tiles(
    model: torch.nn.Module,
    latent: torch.Tensor,
    remote: RemoteVAE,
    output: torch.Tensor,
    poll: Poll,
    needed: int,
    on_clip: Callable[[], None],
) -> None:
    """`model.decode` of a latent [1, C, frames, rows, columns] into `output`, with its tiles run by the ranks.

    `needed`: bytes for one tile; TooLittleMemory where a device has less. `on_clip` is called after each of `latent_clips`.
    """
    scaled = latent * model.latents_std.view(1, -1, 1, 1, 1).to(latent) + model.latents_mean.view(1, -1, 1, 1, 1).to(latent)
    clips = (tiles_of(model, clip, model.vae_ratio) for clip in latent_clips(model, scaled))
    _OnRanks.of(model, remote.run_tiles(clips, poll, needed), on_clip).decode(latent, output_buffer=output)


def encode_in_tiles(
    model: torch.nn.Module,
    pixels: torch.Tensor,
    remote: RemoteVAE,
    poll: Poll,
    needed: int,
    on_clip: Callable[[], None],
) -> torch.Tensor:
    """`model.encode` of pixels [1, 3, frames, rows, columns], as decode_in_tiles. `on_clip`: after each of `pixel_clips`."""
    clips = (tiles_of(model, model._normalize_pixels(clip), 1) for clip in pixel_clips(model, pixels))
    return _OnRanks.of(model, remote.run_tiles(clips, poll, needed), on_clip).encode(pixels)


def latent_clips(model: torch.nn.Module, latent: torch.Tensor) -> list[torch.Tensor]:
    """What ComfyUI's decode_temporal decodes at a time."""
    if latent.shape[2] == 1:
        return [latent]
    padding, clips = model._decode_temporal_chunks(latent.shape[2])
    padded = torch.cat([latent, latent[:, :, -1:].repeat(1, 1, padding, 1, 1)], dim=2)
    step, length = model.tokens_chunk_size, model.tokens_chunk_size + model.token_overlap
    return [padded[:, :, clip * step : clip * step + length] for clip in range(clips)]


def pixel_clips(model: torch.nn.Module, pixels: torch.Tensor) -> list[torch.Tensor]:
    """What ComfyUI's encode_temporal encodes at a time."""
    if pixels.shape[2] == 1:
        return [pixels]
    *clips, last = pixels.split(model.clip_length, dim=2)
    missing = model.clip_length - last.shape[2]
    return [*clips, torch.cat([last, last[:, :, -1:].repeat(1, 1, missing, 1, 1)], dim=2)]


def tile_shape(model: torch.nn.Module, shape: torch.Size) -> tuple[int, ...]:
    """Of one tile of a latent of that shape."""
    frames = min(shape[2], model.tokens_chunk_size + model.token_overlap)
    return (1, shape[1], frames, *(min(size, model.tile_size // model.vae_ratio) for size in shape[3:]))


def tiles_of(model: torch.nn.Module, clip: torch.Tensor, ratio: int) -> torch.Tensor:
    """[1, C, frames, rows, columns] -> [tiles, C, frames, rows, columns] in the order of ComfyUI's loops over them.

    `ratio`: pixels for each row of the clip.
    """
    rows, columns = (
        [slice(start // ratio, (start + length) // ratio) for start, length in zip(starts, lengths, strict=True)]
        for starts, lengths, _overlaps in (model.split_tiles(size * ratio) for size in clip.shape[-2:])
    )
    return torch.cat([clip[..., row, column] for row in rows for column in columns])


class _OnRanks:
    """Mixed into a copy of ComfyUI's model: its tiles come from the ranks, in the order in which it asks for them."""

    @staticmethod
    def of(model: torch.nn.Module, clips: Iterator[torch.Tensor], on_clip: Callable[[], None]) -> torch.nn.Module:
        """`clips`: the tiles of each clip that it is going to ask for."""
        copied = copy.copy(model)
        copied.__class__ = type("OnRanks", (_OnRanks, type(model)), {})
        copied._clips, copied._on_clip = clips, on_clip
        return copied

    def tiled_decode(self, z: torch.Tensor) -> torch.Tensor:
        return self._next_clip(super().tiled_decode, z)

    def tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        return self._next_clip(super().tiled_encode, x)

    def _next_clip(self, blended: Callable[[torch.Tensor], torch.Tensor], clip: torch.Tensor) -> torch.Tensor:
        self._tiles = iter(next(self._clips).float().split(1))
        found = blended(clip)
        self._on_clip()
        return found

    def _decode_pixels(self, _tile: torch.Tensor) -> torch.Tensor:
        return next(self._tiles)

    def _encode_moments(self, _tile: torch.Tensor) -> torch.Tensor:
        return next(self._tiles)
