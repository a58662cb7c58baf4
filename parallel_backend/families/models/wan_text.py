"""Wan's look at the text, with normalized attention guidance: at a second text too, from which it leads away."""

from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from .normalized_guidance import normalized

WORDS = 512
"""Tokens of the text, behind a picture's, that diffusers' class takes for granted."""


class GuidedText(NamedTuple):
    """In the place of the embedded text that blocks are given."""

    text: torch.Tensor
    """[b, p + t, width], with a picture's tokens in front."""
    away: torch.Tensor
    """[b, u, width] of the second text."""
    settings: torch.Tensor
    """[b, 3] float32: scale, tau and alpha by batch entry. At an alpha of 0 it is as without guidance."""


def plain(text: torch.Tensor | GuidedText) -> torch.Tensor:
    """[b, p + t, width]"""
    return text.text if isinstance(text, GuidedText) else text


class GuidedProcessor(WanAttnProcessor):
    """As diffusers' processor, for a GuidedText too."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | GuidedText,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: None = None,
    ) -> torch.Tensor:
        """[b, n, hidden] -> the same shape."""
        if not isinstance(encoder_hidden_states, GuidedText):
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        text, away, settings = encoder_hidden_states
        picture, text = (None, text) if attn.add_k_proj is None else (text[:, :-WORDS], text[:, -WORDS:])
        query = _heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        toward, against = (
            self._look(query, _heads(attn, attn.norm_k(attn.to_k(words))), _heads(attn, attn.to_v(words)))
            for words in (text, away)
        )
        out = normalized(toward, against, *settings[:, :, None, None, None].unbind(1)).type_as(query)
        if picture is not None:
            keys, values = attn.norm_added_k(attn.add_k_proj(picture)), attn.add_v_proj(picture)
            out = out + self._look(query, _heads(attn, keys), _heads(attn, values))
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))

    def _look(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(query, key, value, backend=self._attention_backend)


def _heads(attn: WanAttention, x: torch.Tensor) -> torch.Tensor:
    """[b, n, H D] -> [b, n, H, D]."""
    return x.unflatten(2, (attn.heads, -1))
