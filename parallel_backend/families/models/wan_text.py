"""Wan's cross-attention with normalized attention guidance: it also attends to a second text, from which it leads away."""

from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from .normalized_guidance import normalized
from .wan_block import heads

WORDS = 512
"""Tokens of the text that diffusers' class expects after a picture's."""


class GuidedText(NamedTuple):
    """Takes the place of the embedded text among the blocks' arguments."""

    text: torch.Tensor
    """[b, p + t, width], with a picture's tokens in front."""
    away: torch.Tensor
    """[b, u, width] of the second text."""
    settings: torch.Tensor
    """[b, 3] float32: scale, tau and alpha of each batch entry. Alpha 0 gives the result without guidance."""


def plain(text: torch.Tensor | GuidedText) -> torch.Tensor:
    """The embedded text [b, p + t, width] alone."""
    return text.text if isinstance(text, GuidedText) else text


class GuidedProcessor(WanAttnProcessor):
    """diffusers' processor, which also takes a GuidedText."""

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
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        toward, against = (
            self._attend(query, heads(attn, attn.norm_k(attn.to_k(words))), heads(attn, attn.to_v(words)))
            for words in (text, away)
        )
        scale, tau, alpha = settings[:, :, None, None, None].unbind(1)
        out = normalized(toward, against, scale, tau, alpha).type_as(query)
        if picture is not None:
            keys, values = attn.norm_added_k(attn.add_k_proj(picture)), attn.add_v_proj(picture)
            out = out + self._attend(query, heads(attn, keys), heads(attn, values))
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(query, key, value, backend=self._attention_backend)
