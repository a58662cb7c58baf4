"""What a VAE class is to the ranks: which of its weights they need, the module they run, and the pieces of a video."""

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
    """Settings for VAEClass.build, as JSON has them."""
    tensors: dict[str, torch.Tensor]
    """By the parameter names of the module that VAEClass.build makes."""
    scale: int
    """Pixels for each element of the latent, along rows and along columns."""
    channels: int
    """Channels of the part's output."""


@dataclass(frozen=True)
class Piece:
    """Frames that go through the part at a time."""

    frames: Span
    """Frames of the input."""
    output: int
    """Number of frames that the part returns for them."""


@dataclass(frozen=True)
class Edges:
    """Rows and columns that a convolution's input is padded by. `mode`: see torch.nn.functional.pad."""

    left: int
    right: int
    top: int
    bottom: int
    mode: str = "constant"


class PartModule(nn.Module):
    """Base of the modules that VAEClass.build makes."""

    def reset(self) -> None:
        """Drop the state that is kept between pieces. This base keeps none."""


def set_edges(conv: nn.Module, edges: Edges) -> None:
    """Have a convolution without padding in space padded by `edges` on bands (see VAEClass.build)."""
    vars(conv)["edges"] = edges  # where nn.Module keeps attributes that are neither tensors nor modules


@dataclass(frozen=True)
class VAEClass:
    """A row of VAES."""

    name: str
    weights: Callable[[Mapping[str, torch.Tensor], Part, Mapping[str, Any]], Weights | None]
    """Arguments: the file's tensors by their names in ComfyUI's class; the part; settings that the tensors do not tell, as
    JSON has them. Returns None if the part has an unknown module: such a VAE cannot be cut."""
    build: Callable[[Part, dict[str, Any]], PartModule]
    """Makes the part without weights, on the current device. Its forward(x, first) takes a piece
    [B, C, (frames,) rows, columns] to its output. The module keeps the state that later pieces need until `reset()`.

    The module is written for the whole picture. It runs on a band once rank/vae/banded_layers.py has adopted its
    convolutions, its GroupNorms, the modules in `gathered`, and the modules with an attribute `everywhere`. Convolutions
    must do all padding in space, or name it in an attribute `edges` (Edges). All else, such as upsampling, must be local.
    """
    pieces: Callable[[Part, int], tuple[Piece, ...]]
    """(part, number of frames) -> the pieces in which they go through the part."""
    independent: bool = False
    """The part runs on tiles that do not depend on each other: each rank gets whole tiles, and no bands."""
    gathered: tuple[str, ...] = ()
    """Last names of modules whose outputs every rank needs from all ranks, such as keys and values of an attention:
    [B, tokens, C] or [..., rows, columns]. The order of the tokens must not matter."""


def whole(_part: Part, frames: int) -> tuple[Piece, ...]:
    """VAEClass.pieces of a VAE for images: one piece."""
    return (Piece(Span(0, frames), frames),)
