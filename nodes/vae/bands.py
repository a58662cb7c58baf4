"""ComfyUI's VAE.decode and VAE.encode with the decoder or encoder on the ranks."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import comfy.model_management
import comfy.quant_ops
import comfy.sd
import comfy.utils
import torch

from parallel_backend.client.registry import registry
from parallel_backend.client.shared_tensors import shared_output
from parallel_backend.client.vae import RemoteVAE, TooLittleMemory, bands
from parallel_backend.core.devices import device_kind
from parallel_backend.processes.pool_part import SomeRanks
from parallel_backend.vaes.base import Part, Weights

from ..model.make_room import comfyui_gpus
from ..ui.host import check_cancelled
from .known import Cut, tensors_of
from .tiles import decode_in_tiles, encode_in_tiles, latent_clips, pixel_clips, tile_shape

T = TypeVar("T")
SAMPLED = 16
"""Values of each tensor that the digest of a VAE's weights is made of."""


def too_small(cut: Cut, vae: comfy.sd.VAE, latent: torch.Tensor, ranks: int) -> str | None:
    """Reason, in words that follow 'since', why the latent cannot be cut: not every rank would get a band."""
    if cut.kind.independent:
        return None
    longest = max(cut.known.before(vae.first_stage_model, latent[:1]).shape[-2:])
    if longest >= ranks:
        return None
    return f"the latent has {longest} rows and columns at most, too few for {ranks} ranks"


def decode_on_ranks(vae: comfy.sd.VAE, cut: Cut, latent: torch.Tensor, pool: SomeRanks) -> torch.Tensor:
    """[B, C, (frames,) H, W] -> [B, (frames,) S H, S W, 3] as vae.decode gives it, one batch entry after the other.

    S is the VAE's scale. TooLittleMemory if a device has too little memory for a rank's band.
    """
    model = vae.first_stage_model
    remote, dtype = remote_vae(vae, cut, "decoder", pool)
    entries = [cut.known.before(model, cut.known.drawn(model, entry.to("cpu", dtype))) for entry in latent.split(1)]
    if cut.kind.independent:
        shape, pieces = model.decode_output_shape(latent.shape), len(latent_clips(model, entries[0]))
        needed = int(vae.memory_used_decode(tile_shape(model, latent.shape), dtype))
    else:
        shape = remote.shape(entries[0], cut.weights.scale, cut.weights.channels)
        pieces = remote.pieces(entries[0])
        longest = max(entries[0].shape[-2:])
        share = len(bands(entries[0], 1, len(pool.devices))[0]) / longest
        needed = int(vae.memory_used_decode(counted(cut, latent.shape), dtype) * share)
    make_room(pool, needed)
    on_piece = partial(comfy.utils.ProgressBar(len(latent) * pieces).update, 1)
    run_tiles = partial(remote.run_tiles, poll=check_cancelled, bytes_needed=needed)
    with shared_output(pool, (len(latent), *shape[1:]), vae.vae_output_dtype()) as (images, shared):
        for index, entry in enumerate(entries):
            target = images[index : index + 1]
            if cut.kind.independent:
                decode_in_tiles(model, entry, target, run_tiles, on_piece)
            else:
                scale = cut.weights.scale
                remote.run(entry, scale, target, check_cancelled, shared=shared, bytes_needed=needed, on_piece=on_piece)
            if (processed := vae.process_output(target)) is not target:  # most VAEs' process_output works in place
                target.copy_(processed)
    return images.to(vae.output_device).movedim(1, -1)


def counted(cut: Cut, shape: torch.Size) -> tuple[int, ...]:
    """The shape of one batch entry that ComfyUI's estimates of memory are asked for. `shape`: of the whole input."""
    return (1, shape[1], cut.known.counted(shape[2]), *shape[3:]) if len(shape) == 5 else (1, *shape[1:])


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
    if cut.kind.independent:
        return None
    x = model_input(vae, pixels)
    if x.ndim == 5 and not cut.known.frames(vae.first_stage_model, x.shape[2]):
        return f"this VAE does not take {x.shape[2]} frames evenly"
    longest, scale = max(x.shape[-2:]), cut.weights.scale
    if longest // scale >= ranks:
        return None
    return f"the picture has {longest} rows and columns at most, too few for {ranks} ranks, of {scale} each"


def encode_on_ranks(vae: comfy.sd.VAE, cut: Cut, pixels: torch.Tensor, pool: SomeRanks) -> torch.Tensor:
    """IMAGE -> [B, C, (frames,) h, w] as vae.encode gives it, one batch entry after the other.

    TooLittleMemory if a device has too little memory for a rank's band.
    """
    model, known = vae.first_stage_model, cut.known
    remote, dtype = remote_vae(vae, cut, "encoder", pool)
    whole = model_input(vae, pixels)
    entries = whole.split(1)
    if cut.kind.independent:
        frames = min(whole.shape[2], model.clip_length)
        tile = (1, whole.shape[1], frames, *(min(size, model.tile_size) for size in whole.shape[3:]))
        pieces, needed = len(pixel_clips(model, entries[0])), int(vae.memory_used_encode(tile, dtype))
    else:
        shape = remote.shape(entries[0], cut.weights.scale, cut.weights.channels)
        pieces, units = remote.pieces(entries[0]), max(whole.shape[-2:]) // cut.weights.scale
        share = len(bands(entries[0], cut.weights.scale, len(pool.devices))[0]) / units
        needed = int(vae.memory_used_encode(counted(cut, whole.shape), dtype) * share)
    make_room(pool, needed)
    on_piece = partial(comfy.utils.ProgressBar(len(entries) * pieces).update, 1)
    run_tiles = partial(remote.run_tiles, poll=check_cancelled, bytes_needed=needed)
    latents = []
    for entry in entries:
        x = known.before(model, vae.process_input(entry).to("cpu", dtype))
        if cut.kind.independent:
            latent = encode_in_tiles(model, x, run_tiles, on_piece)
        else:
            latent = torch.empty(shape, dtype=dtype)
            remote.run(x, cut.weights.scale, latent, check_cancelled, bytes_needed=needed, on_piece=on_piece)
        latents.append(known.after(model, latent))
    return torch.cat(latents).to(vae.output_device, vae.vae_output_dtype())


def with_room(pool: SomeRanks, work: Callable[[], T]) -> T:
    """The result of `work`. If memory is short, models on the pool's ranks give way and `work` is tried once more.

    Both tries draw the same noise. TooLittleMemory if the models hold less than what is missing.
    """
    try:
        with noise_put_back():
            return work()
    except TooLittleMemory as short:
        if any(registry().held_on(pool, device) < missing for device, missing in short.missing.items()):
            raise
        for device, missing in short.missing.items():
            registry().make_way(pool, device, missing)
    with noise_put_back():
        return work()


@contextlib.contextmanager
def noise_put_back() -> Iterator[None]:
    """After TooLittleMemory torch's generators are reset, so that the next try (or ComfyUI) draws the same noise."""
    state = torch.get_rng_state()
    backend: Any = getattr(torch, comfy.model_management.vae_device().type, None)  # such as torch.cuda
    device_state = backend.get_rng_state() if hasattr(backend, "get_rng_state") else None  # torch.cpu has no generator
    try:
        yield
    except TooLittleMemory:
        torch.set_rng_state(state)
        if device_state is not None:
            backend.set_rng_state(device_state)
        raise


def remote_vae(vae: comfy.sd.VAE, cut: Cut, part: Part, pool: SomeRanks) -> tuple[RemoteVAE, torch.dtype]:
    """The part on the ranks of the pool, and the dtype that it computes in."""
    on_gpus = all(device_kind(device) == "cuda" for device in pool.devices)
    dtype = vae.vae_dtype if on_gpus else torch.float32
    settings = cut.known.settings(vae.first_stage_model)

    def weights() -> Weights:
        # ComfyUI multiplies quantised layers with rounded inputs; ranks multiply the expanded weights.
        whole = {name: _expanded(tensor) for name, tensor in tensors_of(vae).items()}
        stored = cut.kind.weights(whole, part, settings)
        assert stored is not None  # `how_to_cut` has asked for the same
        return replace(stored, tensors={name: tensor.to("cpu", dtype) for name, tensor in stored.tensors.items()})

    # The id alone is not enough: a new VAE may get a freed one's address, and a node may write into the weights.
    of_file = f"{vae.patcher.patches_uuid} {id(vae.first_stage_model)} {_sample(vae.get_sd().values())}"
    name = f"{of_file} {dtype} {json.dumps(settings, sort_keys=True)}"
    return RemoteVAE(pool, name, cut.known.kind, part, weights, lambda nbytes: make_room(pool, nbytes)), dtype


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, comfy.quant_ops.QuantizedTensor) else tensor


def _sample(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of about SAMPLED values of each tensor, evenly spread."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLED)]
        digest.update(values.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def make_room(pool: SomeRanks, needed: int) -> None:
    """Have ComfyUI free memory on the pool's devices. `needed`: bytes for one rank."""
    for device in comfyui_gpus():
        if ranks := pool.devices.count(str(device)):
            comfy.model_management.free_memory(ranks * needed, device)
