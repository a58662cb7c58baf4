"""The fixed image codec of the quickstart model: a linear map between grey images and 16-channel latents.

An image is cut into blocks of 8x8 pixels; the 4x4 low frequencies of each block's orthonormal DCT-II are the 16
channels (channel = 4 * vertical + horizontal frequency), scaled by constants. Three spaces:

- images [B, 8h, 8w], 0..1, ink is 1;
- model space [B, 16, h, w], what the transformer is trained in;
- raw latents [B, 16, h, w], ComfyUI's Flux latent format around model space: process_in(raw) = model space.
"""

import math

import torch

BLOCK = 8  # pixels
FREQUENCIES = 4  # of the DCT, per direction
CHANNELS = FREQUENCIES * FREQUENCIES

# comfy.latent_formats.Flux: model space = (raw - SHIFT_FACTOR) * SCALE_FACTOR.
SCALE_FACTOR, SHIFT_FACTOR = 0.3611, 0.1159

# Measured on the training images: their mean brightness, and the standard deviation of each frequency, [v][u].
MEAN = 0.23
DEVIATION = (
    (2.74, 0.48, 0.083, 0.044),
    (0.48, 0.103, 0.022, 0.0088),
    (0.083, 0.022, 0.0056, 0.0018),
    (0.044, 0.0088, 0.0018, 0.0008),
)
# Channels have deviation (DEVIATION / DEVIATION[0][0]) ** TEMPER in model space. 0 would give each channel unit
# variance and make the model spend its effort on invisible detail; 1 would drown the edges in noise.
TEMPER = 0.4


def _basis(device: torch.device) -> torch.Tensor:
    """Return the low-frequency rows of the orthonormal DCT-II, [4, 8] float32."""
    pixel = torch.arange(BLOCK, device=device, dtype=torch.float32)
    frequency = torch.arange(FREQUENCIES, device=device, dtype=torch.float32)[:, None]
    rows = torch.cos(math.pi * (pixel + 0.5) * frequency / BLOCK) * math.sqrt(2 / BLOCK)
    rows[0] /= math.sqrt(2)
    return rows


def _gain(device: torch.device) -> torch.Tensor:
    """Return the factor from DCT coefficients to model space, [4, 4] float32."""
    deviation = torch.tensor(DEVIATION, device=device)
    return (deviation / DEVIATION[0][0]) ** TEMPER / deviation


def process_in(raw: torch.Tensor) -> torch.Tensor:
    """Convert raw latents of any shape to model space, as ComfyUI does."""
    return (raw - SHIFT_FACTOR) * SCALE_FACTOR


def process_out(latents: torch.Tensor) -> torch.Tensor:
    """Convert latents in model space, of any shape, to raw latents, as ComfyUI does."""
    return latents / SCALE_FACTOR + SHIFT_FACTOR


def encode(images: torch.Tensor) -> torch.Tensor:
    """Convert images [B, 8h, 8w] in 0..1 to raw latents [B, 16, h, w] float32."""
    basis = _basis(images.device)
    blocks = (images.float() - MEAN).unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [B, h, 8, w, 8]
    frequencies = torch.einsum("bhywx,vy,ux->bvuhw", blocks, basis, basis)
    return process_out((frequencies * _gain(images.device)[:, :, None, None]).flatten(1, 2))


def decode(raw: torch.Tensor) -> torch.Tensor:
    """Convert raw latents [B, 16, h, w] to images [B, 8h, 8w] float32, clamped to 0..1."""
    basis = _basis(raw.device)
    frequencies = process_in(raw.float()).unflatten(1, (FREQUENCIES, FREQUENCIES)) / _gain(raw.device)[:, :, None, None]
    blocks = torch.einsum("bvuhw,vy,ux->bhywx", frequencies, basis, basis)
    return (blocks.flatten(3, 4).flatten(1, 2) + MEAN).clamp(0, 1)
