"""Messages that decode a picture with the VAE."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PutDecoder:
    """Client -> rank: hold this VAE decoder, in place of another one, until a model is loaded or unloaded."""

    name: str
    """Stands for the weights."""
    tensors: dict[str, torch.Tensor]
    """All weights by diffusers' names (checkpoints/vae_keys.py), in the dtype to compute in."""


@dataclass(frozen=True)
class Decode:
    """Client -> rank: decode the rank's rows of a latent."""

    name: str
    """PutDecoder.name of the decoder to use."""
    latent: torch.Tensor
    """[B, C, H, W], the whole latent."""
    bytes_needed: int
    """Memory that one rank's rows take, beside the weights."""


@dataclass(frozen=True)
class Decoded:
    """Rank -> client: the rank's rows of the picture."""

    rank: int
    pixels: torch.Tensor | None
    """[B, 3, rows, W]. None if a rank is short of memory, or does not hold the decoder."""
    short_of_memory: bool
    """One of the ranks has too little memory."""
    bytes_sent: dict[str, int]
    """Payload that left this rank, by mesh axis."""
