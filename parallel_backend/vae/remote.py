"""What the node calls: a latent goes to all ranks, their bands of pixels come back as one picture."""

from collections.abc import Callable, Mapping
from uuid import uuid4

import torch

from .. import messages as m
from ..pool import Poll, Pool, wait_for

Weights = Callable[[], Mapping[str, torch.Tensor]]
"""Gives the decoder's tensors (see keys.to_diffusers) in the dtype to compute in; asked only if the ranks lack them."""


def decode(
    pool: Pool, name: str, latent: torch.Tensor, weights: Weights, poll: Poll
) -> tuple[torch.Tensor, list[m.Decoded]]:
    """[B, C, H, W], at least one row for each rank -> ([B, 3, 8 H, 8 W] on the CPU, what each rank said).

    `name` stands for the weights: the ranks keep those of the last name, until another model is loaded on them. Equal to
    one rank's decoder up to rounding. What `poll` raises ends the waiting; the ranks finish the picture, unheard.
    RankError when a rank fails.
    """
    wait_for(pool.ready, poll)
    parts = _ask(pool, name, latent, poll)
    if any(part.pixels is None for part in parts):
        put = m.PutDecoder(name, dict(weights()))
        for rank in range(len(pool.devices)):
            pool.send(rank, put)
            poll()
        parts = _ask(pool, name, latent, poll)
    return torch.cat([part.pixels for part in parts], dim=2), parts


def _ask(pool: Pool, name: str, latent: torch.Tensor, poll: Poll) -> list[m.Decoded]:
    # A number of no order, since any caller may decode on these ranks: a reply must not be taken for another call's.
    return wait_for(pool.ask(m.Decode(uuid4().int, name, latent), m.Decoded), poll)
