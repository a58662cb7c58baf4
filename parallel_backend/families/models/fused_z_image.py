"""Z-Image's blocks with fused arithmetic between their products (fused.py)."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_z_image as original

from . import fused


class Attention(original.ZSingleStreamAttnProcessor):
    """diffusers' processor, for a text that is refined (without a mask) as for the joint sequence."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: Any = None,
    ) -> torch.Tensor:
        """[b, s, C] -> the same shape. `freqs_cis` [1 or b, s, D / 2] complex: cos + i sin of each pair of channels."""
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in layers)
        turns = fused.rotation(freqs_cis.real[:, :, None], freqs_cis.imag[:, :, None])
        query, key = fused.normed_and_rotated(query, key, (attn.norm_q, attn.norm_k), turns)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        backend, parallel = self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return attn.to_out[1](attn.to_out[0](out.flatten(2).type_as(query)))


class Block(original.ZImageTransformerBlock):
    """diffusers' block, for one time of all tokens."""

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: Any,
        freqs_cis: torch.Tensor,
        adaln_input: torch.Tensor | None = None,
        noise_mask: torch.Tensor | None = None,
        adaln_noisy: torch.Tensor | None = None,
        adaln_clean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, s, C] -> the same shape. `adaln_input` [b, width]."""
        if not self.modulation or noise_mask is not None:
            return super().forward(x, attn_mask, freqs_cis, adaln_input, noise_mask, adaln_noisy, adaln_clean)
        scale, gate, last_scale, last_gate = self.adaLN_modulation(adaln_input)[:, None].chunk(4, dim=2)
        normed = self.attention_norm1(x) * (1 + scale)
        out = self.attention(normed, attention_mask=attn_mask, freqs_cis=freqs_cis)
        x = fused.gated(x, gate.tanh(), self.attention_norm2(out))
        out = self.feed_forward(self.ffn_norm1(x) * (1 + last_scale))
        return fused.gated(x, last_gate.tanh(), self.ffn_norm2(out))


def fuse(model: Any) -> None:
    """See Family.fused_module."""
    fused.adopt(model, {original.ZImageTransformerBlock: Block})
    for block in (*model.noise_refiner, *model.context_refiner, *model.layers):
        fused.give_processor(block.attention, Attention())
