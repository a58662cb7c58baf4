"""Wan's cross-attention to a text of any length, and to a picture's tokens."""

from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from .wan_block import heads


class Texts(NamedTuple):
    """Takes the place of the embedded text among the blocks' arguments."""

    text: torch.Tensor
    """[b, t, width]"""
    picture: torch.Tensor
    """[b, p, width]"""


class TextProcessor(WanAttnProcessor):
    """diffusers' processor for Texts."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Texts,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: None = None,
    ) -> torch.Tensor:
        """[b, n, hidden] -> the same shape."""
        text, picture = encoder_hidden_states
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        out = self._attend(query, heads(attn, attn.norm_k(attn.to_k(text))), heads(attn, attn.to_v(text)))
        keys, values = attn.norm_added_k(attn.add_k_proj(picture)), attn.add_v_proj(picture)
        out = out + self._attend(query, heads(attn, keys), heads(attn, values))
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(query, key, value, backend=self._attention_backend)
