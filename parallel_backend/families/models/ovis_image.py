"""Ovis-Image's class with the double blocks' feed-forwards in three layers, as files have them; diffusers has two in one."""

import functools
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_ovis_image as theirs
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


class _SingleBlock(theirs.OvisImageSingleTransformerBlock):
    """As theirs, with its feed-forward behind its attention: the wide layer's output is not there during attention."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        joint_attention_kwargs: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picture [b, n, width], text [b, t, width], time [b, width] -> text and picture."""
        assert joint_attention_kwargs is None
        words, x = encoder_hidden_states.shape[1], torch.cat((encoder_hidden_states, hidden_states), dim=1)
        normed, gate = self.norm(x, emb=temb)
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        value, opening = self.proj_mlp(normed).chunk(2, dim=-1)
        x = x + gate[:, None] * self.proj_out(torch.cat((attended, value * F.silu(opening)), dim=2))
        if x.dtype == torch.float16:
            x = x.clip(-65504, 65504)
        return x[:, :words], x[:, words:]


class OvisImageTransformer2DModel(diffusers.OvisImageTransformer2DModel):
    """diffusers' class but for `ff` and `ff_context` of the double blocks, and the order of the single ones' work."""

    @functools.wraps(diffusers.OvisImageTransformer2DModel.__init__)
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        for block in self.transformer_blocks:
            for name in ("ff", "ff_context"):
                last = getattr(block, name).net[2]
                setattr(block, name, GatedFeedForward(last.out_features, last.in_features))
        for block in self.single_transformer_blocks:
            block.__class__ = _SingleBlock
