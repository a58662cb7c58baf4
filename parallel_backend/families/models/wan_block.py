"""Wan's block with fused arithmetic between its products (fused.py). Its rotary tables are a `fused.Rotation`."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock

from . import fused


def heads(attn: WanAttention, x: torch.Tensor) -> torch.Tensor:
    """[b, n, H D] -> [b, n, H, D]."""
    return x.unflatten(2, (attn.heads, -1))


class Block(WanTransformerBlock):
    """diffusers' block. Modulation is rounded to the model's dtype, as in ComfyUI's class (comfy/ldm/wan/model.py)."""

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: Any, temb: torch.Tensor, rotary_emb: Any
    ) -> torch.Tensor:
        """[b, n, width] -> the same shape. `temb` [b, 6, width]. `encoder_hidden_states`: as the processor of `attn2` takes
        it. `rotary_emb`: as that of `attn1` does."""
        block: Any = self
        vectors = (block.scale_shift_table.to(temb.dtype) + temb)[:, :, None].unbind(1)
        shift, scale, gate, last_shift, last_scale, last_gate = vectors  # [b, 1, width] each
        x = hidden_states
        x = fused.gated(x, gate, block.attn1(fused.modulated(block.norm1, x, scale, shift), None, None, rotary_emb))
        x = x + block.attn2(block.norm2(x), encoder_hidden_states, None, None)
        return fused.gated(x, last_gate, block.ffn(fused.modulated(block.norm3, x, last_scale, last_shift)))
