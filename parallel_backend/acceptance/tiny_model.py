"""A tiny random model of the bundled one's class (quickstart/mini_flux.py), and its inputs.

8 heads, so that up to 8 ranks can share them; the bundled model has 2. Its file is also one of a tiny Flux,
whose class takes the same conditioning.
"""

import functools
from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel_backend.client.pipefusion.band_cut import packed
from parallel_backend.client.proven_class import call_of, proven
from parallel_backend.core.degrees import Degrees
from parallel_backend.core.own_class import OwnClass
from parallel_backend.own_class.built.building import build
from parallel_backend.own_class.calls.patching import Latents, latents_of
from parallel_backend.own_class.calls.tried_calls import draw_weights
from parallel_backend.quickstart.model import mini_flux

Call = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""The arguments of a model call: latent [B, C, H, W], timesteps [B] and conditioning."""

TINY = mini_flux(
    context_width=24, pooled_width=12, width=128, axes=(4, 6, 6), double_blocks=3, single_blocks=5, guidance=True
)


def tiny_model() -> torch.nn.Module:
    """Return the model on the CPU, with random weights."""
    model = build(TINY)
    draw_weights(model, 0)
    return model


def save(model: torch.nn.Module, path: Path) -> Path:
    """Write the model as a single file."""
    save_file(model.state_dict(), path)
    return path


@functools.cache
def tried(tensor: int) -> OwnClass:
    """Return the class with the results of a trial for `tensor` tensor-parallel ranks. Raises ValueError if they cannot
    share layers."""
    x, _, tensors = call()
    return proven(TINY, call_of(x, tensors), Degrees(pipe=2, ulysses=2, tensor=tensor), "the tiny model")


def call(batch: int = 2, rows: int = 15, columns: int = 11) -> Call:
    """Return a call in the form that the model's forward takes, with odd sizes."""
    g = torch.Generator().manual_seed(1)
    tensors = {
        "context": torch.randn(batch, 7, 24, generator=g),
        "pooled": torch.randn(batch, 12, generator=g),
        "guidance": torch.full((batch,), 4.0),
    }
    return torch.randn(batch, 16, rows, columns, generator=g), torch.full((batch,), 0.7), tensors


def relative(a: torch.Tensor | Latents, b: torch.Tensor | Latents) -> float:
    """Return the relative L2 difference of `a` from `b`."""
    a, b = as_one(a), as_one(b)
    return ((a - b).norm() / b.norm()).item()


def as_one(x: torch.Tensor | Latents) -> torch.Tensor:
    """Return a model's only latent, or all its latents as the single tensor that a sampler has."""
    return packed(latents_of(x))
