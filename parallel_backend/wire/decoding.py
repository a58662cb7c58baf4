"""What crosses processes to decode a picture (messages.py)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PutDecoder:
    """Client -> rank: hold this VAE decoder, in place of another one, until a model is loaded or unloaded.

    `name` stands for the weights. `tensors`: all of them, by diffusers' names (vae/keys.py), in the dtype to compute in.
    """

    name: str
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Decode:
    """Client -> rank: decode your rows of `latent` [B, C, H, W] by the decoder `name`.

    `bytes_needed`: of memory for one rank's rows, beside the weights.
    """

    name: str
    latent: torch.Tensor
    bytes_needed: int


@dataclass(frozen=True)
class Decoded:
    """Rank -> client: the rank's rows [B, 3, rows, W] of the picture.

    None if the ranks do not hold that decoder or, where `short_of_memory`, one of them has too little. `bytes_sent`:
    payload that left this rank.
    """

    rank: int
    pixels: torch.Tensor | None
    short_of_memory: bool
    bytes_sent: dict[str, int]
