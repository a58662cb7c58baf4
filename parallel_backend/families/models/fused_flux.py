"""Flux.1's blocks with fused arithmetic between their products (fused.py)."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_flux as original

from . import fused


class Attention(original.FluxAttnProcessor):
    """diffusers' processor, whose rotary table is a `fused.Rotation` of the joint sequence [text, image]."""

    def __call__(
        self,
        attn: original.FluxAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: fused.Rotation | None = None,
    ) -> Any:
        """[b, n, C] and text [b, t, C'] -> both, the image first; without text [b, s, H D]."""
        assert image_rotary_emb is not None
        if encoder_hidden_states is not None:
            turns = image_rotary_emb, image_rotary_emb
            return two_streams(self, attn, hidden_states, encoder_hidden_states, turns, attn.head_dim, attention_mask)
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = (layer(hidden_states).unflatten(-1, (-1, attn.head_dim)) for layer in layers)
        query, key = fused.normed_and_rotated(query, key, (attn.norm_q, attn.norm_k), image_rotary_emb)
        backend, parallel = self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return out.flatten(2).type_as(query)


class Block(original.FluxTransformerBlock):
    """diffusers' double block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: fused.Rotation | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [b, n, C] and text [b, t, C] -> text and image, the same shapes."""
        image, *image_vectors = self.norm1(hidden_states, emb=temb)
        text, *text_vectors = self.norm1_context(encoder_hidden_states, emb=temb)
        image, text = self.attn(hidden_states=image, encoder_hidden_states=text, image_rotary_emb=image_rotary_emb)
        hidden_states = self._rest(hidden_states, image, image_vectors, self.norm2, self.ff)
        encoder_hidden_states = self._rest(encoder_hidden_states, text, text_vectors, self.norm2_context, self.ff_context)
        if encoder_hidden_states.dtype == torch.float16:
            encoder_hidden_states = encoder_hidden_states.clip(-65504, 65504)
        return encoder_hidden_states, hidden_states

    @staticmethod
    def _rest(x: torch.Tensor, attended: torch.Tensor, vectors: list[torch.Tensor], norm: Any, ff: Any) -> torch.Tensor:
        """Adds attention's output and the feed-forward's. `vectors` [b, C]: gate, shift, scale, gate."""
        gate, shift, scale, last_gate = (vector[:, None] for vector in vectors)
        x = fused.gated(x, gate, attended)
        return fused.gated(x, last_gate, ff(fused.modulated(norm, x, scale, shift)))


class SingleBlock(original.FluxSingleTransformerBlock):
    """diffusers' single block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: fused.Rotation | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [b, n, C] and text [b, t, C] -> text and image, the same shapes."""
        text = encoder_hidden_states.shape[1]
        x = torch.cat((encoder_hidden_states, hidden_states), dim=1)
        normed, gate = self.norm(x, emb=temb)
        widened = self.act_mlp(self.proj_mlp(normed))
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        x = fused.gated(x, gate[:, None], self.proj_out(torch.cat((attended, widened), dim=2)))
        if x.dtype == torch.float16:
            x = x.clip(-65504, 65504)
        return x[:, :text], x[:, text:]


class Positions(original.FluxPosEmbed):
    """diffusers' tables, as a `fused.Rotation`."""

    def forward(self, ids: torch.Tensor) -> fused.Rotation:
        """Positions [s, axes] -> [1, s, 1, D / 2, 2, 2]."""
        return fused.rotation_of_tables(super().forward(ids))


CLASSES = {
    original.FluxTransformerBlock: Block,
    original.FluxSingleTransformerBlock: SingleBlock,
    original.FluxPosEmbed: Positions,
}
"""diffusers' class -> ours."""


def fuse(model: Any) -> None:
    """See Family.fused_module."""
    fused.adopt(model, CLASSES)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        give_processor(block.attn, Attention())


def two_streams(
    processor: Any,
    attn: Any,
    image: torch.Tensor,
    text: torch.Tensor,
    turns: tuple[fused.Rotation, fused.Rotation],
    head_size: int,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over [text, image], each with its own products and norms: image [b, n, C] and text [b, t, C] -> the same.

    `processor`: diffusers', called for its module `attn`. `turns`: the image's tokens have the last rows of the first one,
    the text's have the first rows of the second one. Both may be those of the joint sequence. The products may give more
    tokens than they get: on ranks they may gather those of other ranks, while attention's result is the rank's own.
    """
    layers, word_layers = (attn.to_q, attn.to_k, attn.to_v), (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    query, key, value = (layer(image).unflatten(-1, (-1, head_size)) for layer in layers)
    words, word_keys, word_values = (layer(text).unflatten(-1, (-1, head_size)) for layer in word_layers)
    image_turns, text_turns = turns
    image_turns, text_turns = image_turns[:, image_turns.shape[1] - query.shape[1] :], text_turns[:, : words.shape[1]]
    query, key = fused.normed_and_rotated(query, key, (attn.norm_q, attn.norm_k), image_turns)
    words, word_keys = fused.normed_and_rotated(words, word_keys, (attn.norm_added_q, attn.norm_added_k), text_turns)
    pairs = (words, query), (word_keys, key), (word_values, value)
    query, key, value = (torch.cat(pair, dim=1) for pair in pairs)
    backend, parallel = processor._attention_backend, processor._parallel_config
    out = dispatch_attention_fn(query, key, value, mask, backend=backend, parallel_config=parallel)
    words, out = out.flatten(2).type_as(query).split((text.shape[1], image.shape[1]), dim=1)
    return attn.to_out[1](attn.to_out[0](out.contiguous())), attn.to_add_out(words.contiguous())


def give_processor(attention: torch.nn.Module, processor: Any) -> None:
    """Have an attention module of diffusers call this processor with the arguments that it gets, and do nothing else.

    The class's own forward reads the processor's signature in each call, to leave out arguments that it does not have.
    """
    attention.set_processor(processor)  # type: ignore[operator]
    # Not bound to this processor: a compiled block gets another one.
    attention.forward = lambda *args, **named: attention.processor(attention, *args, **named)  # type: ignore[operator]
