"""Flux.2's blocks with fused arithmetic between their products (fused.py)."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_flux2 as original

from . import fused

Rotations = tuple[fused.Rotation, torch.Tensor]
"""[s, 1, D / 2, 2, 2], and a tensor of s rows that nobody reads: the model's forward joins text and image of both."""


class Attention(original.Flux2AttnProcessor):
    """diffusers' processor of double blocks, with Rotations of the joint sequence [text, image]."""

    def __call__(
        self,
        attn: original.Flux2Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Image [b, n, C] and text [b, t, C] -> the same shapes."""
        turns = image_rotary_emb[0][None]
        streams = hidden_states, encoder_hidden_states
        return fused.two_streams(self, attn, *streams, (turns, turns), attn.head_dim, attention_mask)


class ParallelAttention(original.Flux2ParallelSelfAttnProcessor):
    """diffusers' processor of single blocks, with Rotations. The feed-forward is in it."""

    def __call__(
        self,
        attn: original.Flux2ParallelSelfAttention,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> torch.Tensor:
        """[b, s, C] -> the same shape."""
        widened = attn.to_qkv_mlp_proj(hidden_states)
        # By their shares: a tensor rank has some of the rows of each.
        of_attention = 3 * attn.inner_dim
        of_both = of_attention + attn.mlp_hidden_dim * attn.mlp_mult_factor
        own = widened.shape[-1] * of_attention // of_both
        attended, widened = widened.split((own, widened.shape[-1] - own), dim=-1)
        query, key, value = (part.unflatten(-1, (-1, attn.head_dim)) for part in attended.chunk(3, dim=-1))
        query, key = fused.normed_and_rotated(query, key, (attn.norm_q, attn.norm_k), image_rotary_emb[0][None])
        backend, parallel = self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return attn.to_out(torch.cat((out.flatten(2).type_as(query), attn.mlp_act_fn(widened)), dim=-1))


class Block(original.Flux2TransformerBlock):
    """diffusers' double block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb_mod_img: torch.Tensor,
        temb_mod_txt: torch.Tensor,
        image_rotary_emb: Rotations | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [b, n, C] and text [b, t, C] -> text and image, the same shapes. Modulations [b, 6 C]."""
        image, text = hidden_states, encoder_hidden_states
        (shift, scale, gate), last = original.Flux2Modulation.split(temb_mod_img, 2)
        (text_shift, text_scale, text_gate), text_last = original.Flux2Modulation.split(temb_mod_txt, 2)
        attended, text_attended = self.attn(
            hidden_states=fused.modulated(self.norm1, image, scale, shift),
            encoder_hidden_states=fused.modulated(self.norm1_context, text, text_scale, text_shift),
            image_rotary_emb=image_rotary_emb,
        )
        image = _fed(fused.gated(image, gate, attended), last, self.norm2, self.ff)
        text = _fed(fused.gated(text, text_gate, text_attended), text_last, self.norm2_context, self.ff_context)
        return text.clip(-65504, 65504) if text.dtype == torch.float16 else text, image


def _fed(x: torch.Tensor, vectors: tuple[torch.Tensor, ...], norm: Any, feed_forward: Any) -> torch.Tensor:
    """Adds the feed-forward's output: [b, s, C]. `vectors`: shift, scale, gate."""
    shift, scale, gate = vectors
    return fused.gated(x, gate, feed_forward(fused.modulated(norm, x, scale, shift)))


class SingleBlock(original.Flux2SingleTransformerBlock):
    """diffusers' single block."""

    def forward(  # type: ignore[override]  # diffusers declares the result of other arguments
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        temb_mod: torch.Tensor,
        image_rotary_emb: Rotations | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        split_hidden_states: bool = False,
        text_seq_len: int | None = None,
    ) -> torch.Tensor:
        """Joint sequence [b, s, C] -> the same shape. `temb_mod` [b, 3 C]."""
        assert encoder_hidden_states is None and not split_hidden_states, "the model's forward joins text and image itself"
        ((shift, scale, gate),) = original.Flux2Modulation.split(temb_mod, 1)
        x = hidden_states
        out = self.attn(hidden_states=fused.modulated(self.norm, x, scale, shift), image_rotary_emb=image_rotary_emb)
        x = fused.gated(x, gate, out)
        return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


class Positions(original.Flux2PosEmbed):
    """diffusers' tables, as Rotations."""

    def forward(self, ids: torch.Tensor) -> Rotations:  # type: ignore[override]  # diffusers declares one tensor of its two
        """Positions [s, axes]."""
        return fused.rotation_of_tables(super().forward(ids))[0], ids[:, :1]


CLASSES = {
    original.Flux2TransformerBlock: Block,
    original.Flux2SingleTransformerBlock: SingleBlock,
    original.Flux2PosEmbed: Positions,
}
"""diffusers' class -> ours."""


def fuse(model: Any) -> None:
    """See Family.fused_module."""
    fused.adopt(model, CLASSES)
    for block in model.transformer_blocks:
        fused.give_processor(block.attn, Attention())
    for block in model.single_transformer_blocks:
        fused.give_processor(block.attn, ParallelAttention())
