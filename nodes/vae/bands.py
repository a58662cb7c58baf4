"""ComfyUI's VAE.decode and VAE.encode, with the decoder or encoder computed on the ranks."""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import comfy.model_management
import comfy.quant_ops
import comfy.sd
import comfy.utils
import torch

from parallel_backend.client.registry import registry
from parallel_backend.client.vae import Made, Part, RemoteVAE, TooLittleMemory, bands
from parallel_backend.core.devices import device_kind
from parallel_backend.processes.pool_part import SomeRanks

from ..model.loading.model_file import importing
from ..model.run.make_room import comfyui_gpus
from ..ui.host import check_cancelled
from .known import OTHER, Cut, tensors_of
from .tiles import decode_in_tiles, encode_in_tiles, latent_clips, pixel_clips, tile_shape

T = TypeVar("T")
CALLS = {
    ("decoder", False): "decode",
    ("encoder", False): "encode",
    ("decoder", True): "_decode_pixels",
    ("encoder", True): "_encode_moments",
}
"""(part, whether in tiles) -> the function of ComfyUI's model that ranks call."""
SAMPLED = 16
"""The number of values of each tensor from which the digest of a VAE's weights is computed."""


def too_small(cut: Cut, _vae: comfy.sd.VAE, latent: torch.Tensor, ranks: int) -> str | None:
    """Return the reason, in words that follow 'since', why the latent cannot be cut: not every rank would get a band."""
    longest = max(latent.shape[-2:])
    if cut.known.tiles or longest >= ranks:
        return None
    return f"the latent has at most {longest} rows or columns, too few for {ranks} ranks"


def decode_on_ranks(vae: comfy.sd.VAE, cut: Cut, latent: torch.Tensor, pool: SomeRanks) -> torch.Tensor:
    """[B, C, (frames,) H, W] -> [B, (frames,) S H, S W, 3] as vae.decode gives it, one batch entry after the other.

    S is the VAE's scale. TooLittleMemory if a device has too little memory for a rank's band. NotExact: see RemoteVAE.run.
    """
    model, tiles = vae.first_stage_model, cut.known.tiles
    remote, dtype = remote_vae(vae, cut, "decoder", pool)
    entries = [cut.known.drawn(model, entry.to("cpu", dtype)) for entry in latent.split(1)]
    if tiles:
        shape, pieces = model.decode_output_shape(latent.shape), len(latent_clips(model, entries[0]))
        needed = int(vae.memory_used_decode(tile_shape(model, latent.shape), dtype))
    else:
        scale, pieces = vae.spacial_compression_decode(), 1
        frames = [cut.known.decoded(vae, size) for size in latent.shape[2:-2]]
        channels = getattr(vae, "conv_out_channels", vae.output_channels)
        shape = (1, channels, *frames, *(scale * size for size in latent.shape[-2:]))
        needed = int(vae.memory_used_decode((1, *latent.shape[1:]), dtype) * share(latent, 1, pool))
    make_room(pool, needed)
    on_piece = partial(comfy.utils.ProgressBar(len(latent) * pieces).update, 1)
    run_tiles = partial(remote.run_tiles, poll=check_cancelled, bytes_needed=needed)
    images = torch.empty(len(latent), *shape[1:], dtype=vae.vae_output_dtype())
    for entry, target in zip(entries, images.split(1), strict=True):
        if tiles:
            decode_in_tiles(model, entry, target, run_tiles, on_piece)
        else:
            remote.run(entry, 1, target, check_cancelled, needed)
            on_piece()
        if (processed := vae.process_output(target)) is not target:  # most VAEs' process_output works in place
            target.copy_(processed)
    return images.to(vae.output_device).movedim(1, -1)


def share(x: torch.Tensor, unit: int, pool: SomeRanks) -> float:
    """Return the largest band's fraction of x."""
    return len(bands(x, unit, len(pool.devices))[0]) / (max(x.shape[-2:]) // unit)


def model_input(vae: comfy.sd.VAE, pixels: torch.Tensor) -> torch.Tensor:
    """IMAGE [frames or batch, H, W, C] as vae.encode hands it to its model: [B, 3, (frames,) rows, columns].

    Rows and columns are cropped to multiples of the VAE's scale.
    """
    pixels = vae.vae_encode_crop_pixels(pixels).movedim(-1, 1)
    if vae.latent_dim == 3 and pixels.ndim < 5:
        pixels = pixels.unsqueeze(2) if vae.not_video else pixels.movedim(1, 0).unsqueeze(0)
    return pixels


def pixels_too_small(cut: Cut, vae: comfy.sd.VAE, pixels: torch.Tensor, ranks: int) -> str | None:
    """Reason, in words that follow 'since', why pixels cannot be cut as ComfyUI would encode them. None: they can."""
    if cut.known.tiles:
        return None
    x = model_input(vae, pixels)
    if x.ndim == 5 and not cut.known.encodes(vae.first_stage_model, x.shape[2]):
        return f"this VAE cannot split {x.shape[2]} frames evenly"
    longest, scale = max(x.shape[-2:]), vae.spacial_compression_encode()
    if longest // scale >= ranks:
        return None
    return f"the image has at most {longest} rows or columns, too few for {ranks} ranks with {scale} each"


def encode_on_ranks(vae: comfy.sd.VAE, cut: Cut, pixels: torch.Tensor, pool: SomeRanks) -> torch.Tensor:
    """IMAGE -> [B, C, (frames,) h, w] as vae.encode gives it, one batch entry after the other.

    Raises TooLittleMemory if a device has too little memory for a rank's band. NotExact: see RemoteVAE.run.
    """
    model, tiles = vae.first_stage_model, cut.known.tiles
    remote, dtype = remote_vae(vae, cut, "encoder", pool)
    whole = model_input(vae, pixels)
    entries, scale = whole.split(1), vae.spacial_compression_encode()
    if tiles:
        frames = min(whole.shape[2], model.clip_length)
        tile = (1, whole.shape[1], frames, *(min(size, model.tile_size) for size in whole.shape[3:]))
        pieces, needed = len(pixel_clips(model, entries[0])), int(vae.memory_used_encode(tile, dtype))
    else:
        pieces, frames = 1, [vae.downscale_ratio[0](size) for size in whole.shape[2:-2]]
        shape = (1, vae.latent_channels, *frames, *(size // scale for size in whole.shape[-2:]))
        needed = int(vae.memory_used_encode((1, *whole.shape[1:]), dtype) * share(whole, scale, pool))
    make_room(pool, needed)
    on_piece = partial(comfy.utils.ProgressBar(len(entries) * pieces).update, 1)
    run_tiles = partial(remote.run_tiles, poll=check_cancelled, bytes_needed=needed)
    latents = []
    for entry in entries:
        x = vae.process_input(entry).to("cpu", dtype)
        if tiles:
            latents.append(encode_in_tiles(model, x, run_tiles, on_piece))
        else:
            latents.append(torch.empty(shape, dtype=dtype))
            remote.run(x, scale, latents[-1], check_cancelled, needed)
            on_piece()
    return torch.cat(latents).to(vae.output_device, vae.vae_output_dtype())


def with_room(pool: SomeRanks, work: Callable[[], T]) -> T:
    """Return the result of `work`. If memory is short, models on the pool's ranks move to host memory, and `work` is tried
    once more."""
    try:
        return work()
    except TooLittleMemory as short:
        if any(registry().held_on(pool, device) < missing for device, missing in short.missing.items()):
            raise
        for device, missing in short.missing.items():
            registry().make_way(pool, device, missing)
    return work()


def remote_vae(vae: comfy.sd.VAE, cut: Cut, part: Part, pool: SomeRanks) -> tuple[RemoteVAE, torch.dtype]:
    """Return the part of the VAE on the ranks of the pool, and the dtype in which it computes."""
    on_gpus = all(device_kind(device) == "cuda" for device in pool.devices)
    dtype = vae.vae_dtype if on_gpus else torch.float32
    recipe = {
        "tree": cut.tree,
        **importing(pool.devices[0]),
        "call": CALLS[part, cut.known.tiles],
        "constants": cut.known.constants,
    }

    def made() -> Made:
        tensors = {name: tensor for name, tensor in tensors_of(vae).items() if not name.startswith(f"{OTHER[part]}.")}
        return Made(json.dumps(recipe), {name: _to_send(tensor, dtype) for name, tensor in tensors.items()})

    # The id alone is not enough: a new VAE may get a freed one's address, and a node may write into the weights.
    name = f"{vae.patcher.patches_uuid} {id(vae.first_stage_model)} {_sample(vae.get_sd().values())} {dtype}"
    name += hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    return RemoteVAE(pool, name, part, made, lambda nbytes: make_room(pool, nbytes)), dtype


def _to_send(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # ComfyUI multiplies quantised layers with rounded inputs; ranks multiply the expanded weights.
    tensor = tensor.dequantize() if isinstance(tensor, comfy.quant_ops.QuantizedTensor) else tensor
    return tensor.to("cpu", dtype if tensor.is_floating_point() else None)


def _sample(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of about SAMPLED values of each tensor, evenly spread."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLED)]
        digest.update(values.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def make_room(pool: SomeRanks, needed: int) -> None:
    """Make ComfyUI free memory on the pool's devices. `needed`: bytes for one rank."""
    for device in comfyui_gpus():
        if ranks := pool.devices.count(str(device)):
            comfy.model_management.free_memory(ranks * needed, device)
