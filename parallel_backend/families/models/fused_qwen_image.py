"""Qwen-Image's blocks with fused arithmetic between their products (fused.py)."""

from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage as original
from torch import nn

from . import fused

Rotations = tuple[fused.Rotation, fused.Rotation]
"""Of the image's tokens, and of the text's."""


class Attention(original.QwenDoubleStreamAttnProcessor2_0):
    """diffusers' processor without its mask, with Rotations, and for no words at all."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any = None,
        encoder_hidden_states_mask: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Image [b, n, C] and text [b, t, C] -> the same shapes. Attention is over [text, image].

        `image_rotary_emb`: Rotations.
        """
        assert image_rotary_emb is not None and encoder_hidden_states_mask is None
        size = attn.inner_dim // attn.heads
        return fused.two_streams(self, attn, hidden_states, encoder_hidden_states, image_rotary_emb, size)


class Block(original.QwenImageTransformerBlock):
    """diffusers' block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None,
        temb: torch.Tensor,
        image_rotary_emb: Rotations | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [b, n, C] and text [b, t, C] -> text and image, the same shapes.

        `modulate_index` [1, n] bool, with `temb` [2 b, C]: the image's tokens that are at the time of its second half.
        """
        image, text = hidden_states, encoder_hidden_states
        image_vectors = _vectors(self.img_mod(temb), modulate_index)
        text_vectors = _vectors(self.txt_mod(temb.chunk(2)[0] if self.zero_cond_t else temb), None)
        attended, text_attended = self.attn(
            hidden_states=fused.modulated(self.img_norm1, image, *image_vectors[1::-1]),
            encoder_hidden_states=fused.modulated(self.txt_norm1, text, *text_vectors[1::-1]),
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
        )
        image = _rest(image, attended, image_vectors[2:], self.img_norm2, self.img_mlp)
        text = _rest(text, text_attended, text_vectors[2:], self.txt_norm2, self.txt_mlp)
        if text.dtype == torch.float16:
            text = text.clip(-65504, 65504)
        if image.dtype == torch.float16:
            image = image.clip(-65504, 65504)
        return text, image


def _vectors(modulation: torch.Tensor, at_zero: torch.Tensor | None) -> list[torch.Tensor]:
    """[b, 6 C] -> shift, scale, gate of attention, then of the feed-forward, [b, 1, C] each.

    With `at_zero` [1, n] bool, of [2 b, 6 C]: [b, n, C] each, of the second half where it is true.
    """
    vectors = modulation[:, None].chunk(6, dim=-1)
    if at_zero is None:
        return list(vectors)
    halves = (vector.chunk(2) for vector in vectors)
    return [torch.where(at_zero[..., None], zero, sampler_time) for sampler_time, zero in halves]


def _rest(x: torch.Tensor, attended: torch.Tensor, vectors: list[torch.Tensor], norm: nn.Module, mlp: nn.Module):
    """Adds attention's output and the feed-forward's: [b, s, C]. `vectors`: gate, shift, scale, gate."""
    gate, shift, scale, last_gate = vectors
    x = fused.gated(x, gate, attended)
    return fused.gated(x, last_gate, mlp(fused.modulated(norm, x, scale, shift)))


def fuse(model: Any) -> None:
    """See Family.fused_module. `pos_embed` has to return Rotations."""
    fused.adopt(model, {original.QwenImageTransformerBlock: Block})
    for block in model.transformer_blocks:
        fused.give_processor(block.attn, Attention())
