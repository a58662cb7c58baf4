"""Wan's block with fused arithmetic between its products (fused.py). Its rotary tables are a `fused.Rotation`."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformerBlock

from . import fused


class RotaryProcessor(WanAttnProcessor):
    """diffusers' processor of self-attention."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: fused.Rotation | None = None,
    ) -> torch.Tensor:
        """[b, n, hidden] -> the same shape."""
        assert rotary_emb is not None
        query, key = (
            heads(attn, norm(layer(hidden_states))) for norm, layer in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
        )
        query, key = fused.both_rotated(query, key, rotary_emb)
        value, backend, parallel = heads(attn, attn.to_v(hidden_states)), self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))


def heads(attn: WanAttention, x: torch.Tensor) -> torch.Tensor:
    """[b, n, H D] -> [b, n, H, D]."""
    return x.unflatten(2, (attn.heads, -1))


class Block(WanTransformerBlock):
    """diffusers' block. Modulation is rounded to the model's dtype, as in ComfyUI's class (comfy/ldm/wan/model.py)."""

    def __init__(self, *block: Any):
        super().__init__(*block)
        attention: Any = self.attn1
        attention.processor = RotaryProcessor()

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
