"""What a family is to the backend: data, and a few functions of a line or two."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..layout import Span
from ..tensor_parallel import Plan

Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint key (original layout, no prefix) -> shape."""

TEXT_MASK = "text_mask"
"""Name of a conditioning tensor [B, T] bool that any family may have: which text tokens attention may see. It never
reaches the model's own code, which knows one rank's tokens only; the seam applies it (attention.py)."""


@dataclass(frozen=True)
class Source:
    """Where a parameter's values are: rows `rows` (None: all) of checkpoint tensor `key`.

    `swap_halves`: the first and second half of the rows are exchanged (adaLN's shift and scale in diffusers' order).
    """

    key: str
    rows: Span | None = None
    swap_halves: bool = False


@dataclass(frozen=True)
class StepInputs:
    """What a family's `arguments` may use to call the model's own forward for one micro-step, all on the rank's device.

    `x`: [b, n, C] the rank's shard of the band's packed latent, None where the rank has no prologue.
    `timestep`: [b] float32, as the sampler gave it. `tensors`: the conditioning's, entries of this micro-step only.
    `grid`, `image`, `text`: token grid of the whole image; positions of the rank's image and text tokens.
    """

    x: torch.Tensor | None
    timestep: torch.Tensor
    tensors: dict[str, torch.Tensor]
    grid: tuple[int, ...]
    image: Span
    text: Span


@dataclass(frozen=True)
class Family:
    """One row of the registry. Names in `block_lists`, `prologue`, `epilogue` are attributes of the diffusers class.

    detect: key shapes -> is it this family. configure: key shapes -> the class's constructor arguments.
    recipe: constructor arguments -> parameter name -> Source. pack/unpack: latent [B, C, H, W] <-> tokens [B, N, c].
    conditioning: constructor arguments, ComfyUI's keyword arguments of a model call -> the tensors that the ranks need;
    ValueError for what is missing or cannot be forwarded.
    example: constructor arguments, text tokens -> random conditioning tensors of batch 1, to time the model with.
    time_embed: submodule whose first argument is the timestep, and the factor between the sampler's and its own.
    prepare: tells the model's own modules, before its forward, what the forward's arguments cannot.
    output: what the forward returns -> tokens [b, n, c].
    """

    name: str
    model_class: str
    block_lists: tuple[str, ...]
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]
    token_tensors: tuple[str, ...]  # conditioning tensors with a text token axis (axis 1), needed by the first stage
    vector_tensors: tuple[str, ...]  # conditioning tensors that every stage needs
    time_embed: tuple[str, float]
    latent_channels: Callable[[dict[str, Any]], int]
    hidden: Callable[[dict[str, Any]], int]
    heads: Callable[[dict[str, Any]], int]
    head_size: Callable[[dict[str, Any]], int]
    blocks: Callable[[dict[str, Any]], dict[str, int]]  # block list -> how many
    tensor_plan: Plan
    detect: Callable[[Shapes], bool]
    configure: Callable[[Shapes], dict[str, Any]]
    recipe: Callable[[dict[str, Any]], dict[str, Source]]
    arguments: Callable[[StepInputs], dict[str, Any]]
    conditioning: Callable[[dict[str, Any], dict[str, Any]], dict[str, torch.Tensor]]
    example: Callable[[dict[str, Any], int], dict[str, torch.Tensor]]
    grid: Callable[[tuple[int, ...]], tuple[int, ...]]  # latent [..., H, W] shape -> token grid (rows, columns)
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
    patch_rows: int  # latent rows per token row
    text_first: bool = True  # joint sequence [text, image]; False: [image, text]
    prepare: Callable[[nn.Module, StepInputs], None] = lambda _model, _step: None
    output: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens
    max_side: Callable[[dict[str, Any]], int | None] = lambda _config: None  # tokens; None: positions have no end
    key_aliases: dict[str, str] = field(default_factory=dict)  # key endings that some files use for others

    def run(self, model: nn.Module, step: StepInputs) -> torch.Tensor:
        """The model's own forward for one micro-step: tokens [b, n, c], unless the stage ends it before its epilogue."""
        self.prepare(model, step)
        return self.output(model(**self.arguments(step), return_dict=False)[0])

    def block_count(self, config: dict[str, Any]) -> int:
        return sum(self.blocks(config).values())
