"""Ovis-Image's transformer with double blocks' feed-forwards of three layers, as in files. diffusers joins two of them."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_ovis_image as original
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


class _SingleBlock(original.OvisImageSingleTransformerBlock):
    """diffusers' block with the feed-forward after attention, so that the wide layer's output is not held during it."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        joint_attention_kwargs: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picture [b, n, width], text [b, t, width], embedded time [b, width] -> text and picture."""
        assert joint_attention_kwargs is None
        text_tokens, x = encoder_hidden_states.shape[1], torch.cat((encoder_hidden_states, hidden_states), dim=1)
        normed, gate = self.norm(x, emb=temb)
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        value, activation = self.proj_mlp(normed).chunk(2, dim=-1)
        x = x + gate[:, None] * self.proj_out(torch.cat((attended, value * F.silu(activation)), dim=2))
        if x.dtype == torch.float16:
            x = x.clip(-65504, 65504)
        return x[:, :text_tokens], x[:, text_tokens:]


class OvisImageTransformer2DModel(original.OvisImageTransformer2DModel):
    """diffusers' class with other modules `ff` and `ff_context` in double blocks, and _SingleBlock."""

    @functools.wraps(original.OvisImageTransformer2DModel.__init__)
    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        for block in self.transformer_blocks:
            for name in ("ff", "ff_context"):
                last = getattr(block, name).net[2]
                setattr(block, name, GatedFeedForward(last.out_features, last.in_features))
        for block in self.single_transformer_blocks:
            block.__class__ = _SingleBlock
