"""What a class of VAE is: which of its weights ranks need, what they run, in which pieces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from parallel_backend.core.spans import Span

Part = Literal["decoder", "encoder"]


@dataclass(frozen=True)
class Weights:
    """One part of a VAE, read from the tensors of its file."""

    config: dict[str, Any]
    """Values that JSON has, for VAEClass.build."""
    tensors: dict[str, torch.Tensor]
    """By the names of the module that VAEClass.build makes."""
    scale: int
    """Rows of pixels for each row of the latent, and columns."""
    channels: int
    """Of the part's output."""


@dataclass(frozen=True)
class Piece:
    """Frames that go through the part at a time."""

    frames: Span
    """Of the input."""
    output: int
    """How many frames they become."""


@dataclass(frozen=True)
class Edges:
    """Rows and columns that a convolution's input is padded by. `mode`: see torch.nn.functional.pad."""

    left: int
    right: int
    top: int
    bottom: int
    mode: str = "constant"


@dataclass(frozen=True)
class VAEClass:
    """A row of VAES."""

    name: str
    weights: Callable[[Mapping[str, torch.Tensor], Part, Mapping[str, Any]], Weights | None]
    """From tensors by the names of ComfyUI's class, and settings that tensors do not tell (values that JSON has). None if a
    module of the part is unknown: such a VAE cannot be cut."""
    build: Callable[[Part, dict[str, Any]], nn.Module]
    """The part without weights, on the current device. Its forward(x, first) takes a piece [B, C, (frames,) rows, columns]
    to its output. What later pieces need of this one stays in the module until `reset()`.

    Written for the whole picture, it runs on a band once rank/vae/banded_layers.py has adopted its layers: convolutions,
    GroupNorms, what `gathered` names, and the modules that have an attribute `everywhere`. All padding in space is the
    convolutions' own, or stands in an attribute `edges` (Edges) of theirs. Upsampling and the like must be local.
    """
    pieces: Callable[[Part, int], tuple[Piece, ...]]
    """How a number of frames goes through."""
    independent: bool = False
    """The part runs on tiles that have nothing to do with each other: a rank has some of them, and no band."""
    gathered: tuple[str, ...] = ()
    """Last names of modules whose output all ranks need of each other, such as an attention's keys and values:
    [B, tokens, C] or [..., rows, columns]. Their order does not matter."""


def whole(_part: Part, frames: int) -> tuple[Piece, ...]:
    """Pieces of a VAE for images."""
    return (Piece(Span(0, frames), frames),)
