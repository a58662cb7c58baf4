"""One configuration of a family, with all that the tests need of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_backend.checkpoints.checkpoint import to_original
from parallel_backend.core.degrees import Degrees
from parallel_backend.families import FAMILIES, Family
from testing import tiny

Tensors = dict[str, torch.Tensor]
PAIRS = (
    Degrees(batch=2),
    Degrees(pipe=2),
    Degrees(ulysses=2),
    Degrees(ring=2),
    Degrees(tensor=2),
    Degrees(patch=2, patch_mode="displaced"),
)
"""Every mode at two ranks whose calls are exact."""


@dataclass(frozen=True)
class Native:
    """How ComfyUI builds and feeds the same family: `config` is one whose native model its detection takes (small).

    `conditioning(generator)`: (text [1, T, D], the extras of a CONDITIONING entry: tensors or plain values). `latent`:
    [C, (T,) H, W]. `newer`: class of ComfyUI's supported_models that the oldest ComfyUI of the tests lacks. `limit`:
    largest absolute difference in fp32. `detected`: entries of the unet_config that detection takes for granted and that
    are others in a small model; under "classes", sizes by which ComfyUI tells a class apart. `companion`: of a nested
    latent's other part. `masks`: "mask", "mask_companion" -> shapes of noise masks for its parts.
    `boolean_masks`: its class masks attention by booleans, which only ComfyUI's kernel of PyTorch's attention reads so.
    """

    config: dict[str, Any]
    conditioning: Callable[[torch.Generator], tuple[torch.Tensor, dict[str, Any]]]
    latent: tuple[int, ...]
    cfg: float = 3.0
    limit: float = 5e-5
    scheduler: str = "simple"
    detected: dict[str, Any] = field(default_factory=dict)
    companion: tuple[int, ...] | None = None
    masks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    newer: str = ""
    boolean_masks: bool = False


@dataclass(frozen=True)
class Case:
    """A tiny configuration. `latent`: [C, (T,) H, W] that the model takes; `odd`: sizes that need padding, None if refused.

    `tensors(generator, batch)`: conditioning tensors as the family's `conditioning` gives them. `reference(model, x,
    timestep, tensors)`: diffusers' forward, called as its pipeline calls it, on a latent of any size, with the sampler's
    timestep: what the family must equal. `sampled`: the output has the latent's shape, so that a sampler can be tried
    without ComfyUI, which adds the other channels. `fine_time`: a timestep in bf16 is as good. `rounds_time`: ComfyUI's
    class itself rounds the timestep to the compute dtype, and ours with it. `full`: tables of all cases have it in the full
    tier only: it is a further variant of a model that another case shows in the default tier. `marks`: keys without values
    of a single file.
    """

    name: str
    family: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    odd: tuple[int, ...] | None
    tensors: Callable[[torch.Generator, int], Tensors]
    reference: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, Tensors], torch.Tensor]
    timestep: float = 0.7
    adjust: Callable[[torch.nn.Module], None] = lambda model: None  # after random weights: tables, norms
    native: Native | None = None
    bands: int = 3
    sampled: bool = True
    fine_time: bool = False
    rounds_time: bool = False
    full: bool = False
    marks: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> Family:
        return FAMILIES[self.family]

    def model(self, config: dict[str, Any] | None = None) -> torch.nn.Module:
        """The family's class with random weights in which every part shows."""
        model = self.row.transformer_class()(**(config or self.config)).eval()
        model = tiny.randomise(model, 0)
        self.adjust(model)
        return model

    def save(self, model: torch.nn.Module, path: Path, config: dict[str, Any] | None = None) -> Path:
        """As a single file in the family's original key layout."""
        state = to_original(self.row, dict(model.config) | (config or self.config), model.state_dict())
        state |= {mark: torch.zeros(0) for mark in self.marks}
        save_file({key: value.contiguous() for key, value in state.items()}, path)
        return path

    def inputs(self, batch: int = 2, latent: tuple[int, ...] | None = None, seed: int = 1):
        """(x, timestep, tensors) of a model call."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, *(latent or self.latent), generator=generator)
        return x, torch.full((batch,), self.timestep), self.tensors(generator, batch)


def norms_near_one(*endings: str) -> Callable[[torch.nn.Module], None]:
    """A Case.adjust: norms whose names have these endings scale by about one, as trained ones do.

    The output of a model that can be sampled becomes small: at sigmas up to 1000 a larger one would take the latent so far
    that old keys do not show in it.
    """

    def adjust(model: torch.nn.Module) -> None:
        if model.config.in_channels < 16:
            model.proj_out.weight.data *= 0.02
            model.proj_out.bias.data *= 0.02
        for name, parameter in model.named_parameters():
            if name.endswith(endings):
                parameter.data += 1

    return adjust
