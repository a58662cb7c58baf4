"""Wan's cross-attention to a text of any length, to a picture's tokens, and to a second text, from which it leads away."""

from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from .normalized_guidance import normalized
from .wan_block import heads


class Texts(NamedTuple):
    """Takes the place of the embedded text among the blocks' arguments."""

    text: torch.Tensor
    """[b, t, width]"""
    picture: torch.Tensor | None = None
    """[b, p, width] of the picture, for models with layers for it."""
    away: torch.Tensor | None = None
    """[b, u, width] of the second text. None: there is no guidance."""
    settings: torch.Tensor | None = None
    """[b, 3] float32: scale, tau and alpha of each batch entry. Alpha 0 gives the result without guidance."""


def plain(text: torch.Tensor | Texts) -> torch.Tensor | Texts:
    """The texts without guidance."""
    if not isinstance(text, Texts):
        return text
    return text.text if text.picture is None else Texts(text.text, text.picture)


class TextProcessor(WanAttnProcessor):
    """diffusers' processor, which also takes Texts."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | Texts,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: None = None,
    ) -> torch.Tensor:
        """[b, n, hidden] -> the same shape."""
        if not isinstance(encoder_hidden_states, Texts):
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        text, picture, away, settings = encoder_hidden_states
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))

        def attended(words: torch.Tensor) -> torch.Tensor:
            return self._attend(query, heads(attn, attn.norm_k(attn.to_k(words))), heads(attn, attn.to_v(words)))

        out = attended(text)
        if away is not None and settings is not None:
            scale, tau, alpha = settings[:, :, None, None, None].unbind(1)
            out = normalized(out, attended(away), scale, tau, alpha).type_as(query)
        if picture is not None:
            keys, values = attn.norm_added_k(attn.add_k_proj(picture)), attn.add_v_proj(picture)
            out = out + self._attend(query, heads(attn, keys), heads(attn, values))
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(query, key, value, backend=self._attention_backend)
