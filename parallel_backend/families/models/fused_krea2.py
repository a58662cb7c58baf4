"""Krea 2's blocks with fused arithmetic between their products (fused.py)."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_krea2 as original

from . import fused


class Attention(original.Krea2AttnProcessor):
    """diffusers' processor, whose rotary table is a `fused.Rotation`."""

    def __call__(
        self,
        attn: original.Krea2Attention,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: fused.Rotation | None = None,
    ) -> torch.Tensor:
        """[b, s, C] -> the same shape."""
        if image_rotary_emb is None:
            return super().__call__(attn, hidden_states, attention_mask)
        query = attn.to_q(hidden_states).unflatten(-1, (attn.num_heads, attn.head_dim))
        key, value = (
            layer(hidden_states).unflatten(-1, (attn.num_kv_heads, attn.head_dim)) for layer in (attn.to_k, attn.to_v)
        )
        query, key = fused.normed_and_rotated(query, key, (attn.norm_q, attn.norm_k), image_rotary_emb, offset=1.0)
        if (sharing := attn.num_heads // attn.num_kv_heads) > 1:
            key, value = (x.repeat_interleave(sharing, dim=2) for x in (key, value))
        backend, parallel = self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return attn.to_out[0](out.flatten(2) * torch.sigmoid(attn.to_gate(hidden_states)))


class Block(original.Krea2TransformerBlock):
    """diffusers' block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: fused.Rotation,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, s, C] -> the same shape. `temb` [b, 1 or s, 6 C]."""
        modulation = temb.unflatten(-1, (6, -1)) + self.scale_shift_table
        scale, shift, gate, last_scale, last_shift, last_gate = modulation.unbind(-2)
        x = hidden_states
        normed = _modulated(self.norm1, x, scale, shift)
        x = fused.gated(x, gate, self.attn(normed, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb))
        return fused.gated(x, last_gate, self.ff(_modulated(self.norm2, x, last_scale, last_shift)))


def _modulated(norm: original.Krea2RMSNorm, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift: [b, s, C]. The norm's own factor, 1 + weight in float32, is part of the modulation."""
    factor = (norm.weight + 1) * (1 + scale.float())
    return torch.addcmul(shift, F.rms_norm(x, (norm.dim,), eps=norm.eps), factor.to(x.dtype))


class FinalLayer(original.Krea2FinalLayer):
    """diffusers' last layer."""

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """[b, s, C] -> [b, s, channels]. `temb` [b, 1, C]."""
        scale, shift = (temb + self.scale_shift_table).chunk(2, dim=1)
        return self.linear(_modulated(self.norm, hidden_states, scale, shift))


class Positions(original.Krea2RotaryPosEmbed):
    """diffusers' tables, as a `fused.Rotation`."""

    def forward(self, ids: torch.Tensor) -> fused.Rotation:
        """Positions [s, axes] -> [1, s, 1, D / 2, 2, 2]."""
        return fused.rotation_of_tables(super().forward(ids))


CLASSES = {
    original.Krea2TransformerBlock: Block,
    original.Krea2FinalLayer: FinalLayer,
    original.Krea2RotaryPosEmbed: Positions,
}
"""diffusers' class -> ours."""


def fuse(model: Any) -> None:
    """See Family.fused_module."""
    fused.adopt(model, CLASSES)
    for block in model.transformer_blocks:
        fused.give_processor(block.attn, Attention())
