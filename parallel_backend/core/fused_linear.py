"""A linear layer that takes an activation for its input and a residual, as ComfyUI's layers do from version 0.39 on."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def fused(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    input_act: str | None = None,
    act_weight: torch.Tensor | None = None,
    act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`residual + residual_scale * product(act(x))`, as ComfyUI's layers compute it. Raises ValueError for an unknown
    activation."""
    out = product(_activated(x, input_act, act_weight, act_eps))
    if residual is None:
        return out
    return residual + out if residual_scale is None else torch.addcmul(residual, out, residual_scale)


def _activated(x: torch.Tensor, name: str | None, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    match name:
        case None | "none":
            return x
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        case "situ":
            hidden, gate = x.chunk(2, dim=-1)
            return 25 * (hidden / 25).tanh() * (4 * (gate / 4).tanh() * gate.sigmoid())
        case "rms_norm":
            return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    raise ValueError(f"a linear layer with the input activation {name!r} is not known")


class FusedLinear(nn.Linear):
    """A linear layer that can be called in this way. Its forward and hooks, such as sums over ranks, only get the
    product."""

    def __call__(self, input: torch.Tensor, **more: Any) -> torch.Tensor:
        """The layer's output, [..., in] -> [..., out]. `more`: see `fused`."""
        return fused(super().__call__, input, **more) if more else super().__call__(input)
