"""VAEs on ranks, for tests and benchmarks."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from parallel_backend.client.vae import Made, Part, RemoteVAE
from parallel_backend.own_class.built.module_tree import described
from parallel_backend.processes.pool import Poll, Pool

from .vae_class import SCALE, SmallVAE

CALLS: dict[Part, str] = {"decoder": "decode", "encoder": "encode"}


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Random weights, large enough that every part of the model changes the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        is_matrix = parameter.ndim > 1
        parameter.data = drawn * 0.7 / parameter[0].numel() ** 0.5 if is_matrix else drawn * 0.1 + ("norm_" in name)
    return model


def small_vae(channels: int = 4, kind: type[SmallVAE] = SmallVAE) -> SmallVAE:
    """With random weights."""
    return randomise(kind(channels, 32).eval().requires_grad_(False), seed=0)


def made_of(vae: nn.Module, part: Part = "decoder", folder: str = "", settings: Iterable[Any] = ()) -> Made:
    """What ranks make the part of."""
    (other,) = CALLS.keys() - {part}
    recipe = {
        "tree": described(vae, (other,)),
        "folder": folder,
        "settings": [*settings],
        "call": CALLS[part],
        "constants": [],
    }
    tensors = {**dict(vae.named_buffers()), **vae.state_dict()}
    return Made(json.dumps(recipe), {name: each for name, each in tensors.items() if not name.startswith(f"{other}.")})


class OnRanks:
    """The decoder of a `small_vae`, or its encoder, on the ranks of a pool. `made` is asked when they lack it."""

    def __init__(
        self,
        pool: Pool,
        name: str,
        made: Callable[[], Made],
        part: Part = "decoder",
        dtype: torch.dtype = torch.float32,
    ):
        self.remote, self._dtype = RemoteVAE(pool, name, part, made), dtype

    def run(self, x: torch.Tensor, poll: Poll, bytes_needed: int = 0) -> torch.Tensor:
        """The output for x."""
        return self.remote.run(x, 1 if self.remote.part == "decoder" else SCALE, poll, bytes_needed).to(self._dtype)
