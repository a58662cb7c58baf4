"""Ovis-Image's class with the double blocks' feed-forwards in three layers, as files have them; diffusers has two in one."""

import functools
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import nn


class GatedFeedForward(nn.Module):
    """SwiGLU from `width` over `inner` channels."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, n, width] -> [b, n, width]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OvisImageTransformer2DModel(diffusers.OvisImageTransformer2DModel):
    """diffusers' class but for `ff` and `ff_context` of the double blocks, which compute the same."""

    @functools.wraps(diffusers.OvisImageTransformer2DModel.__init__)
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        for block in self.transformer_blocks:
            for name in ("ff", "ff_context"):
                last = getattr(block, name).net[2]
                setattr(block, name, GatedFeedForward(last.out_features, last.in_features))
