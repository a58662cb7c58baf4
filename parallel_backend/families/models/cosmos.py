"""Cosmos Predict2's transformer: diffusers' class without torchvision, with which it resizes a padding mask."""

import functools

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_cosmos as original
from einops import rearrange

from .dispatched_attention import DispatchedAttention, Rotary


class Processor(DispatchedAttention):
    """Attention processor in place of diffusers', which torch.compile cannot trace in one graph."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """[b, n, width], and in cross-attention the text [b, t, w] -> [b, n, width]."""
        assert attention_mask is None
        others = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(2, (attn.heads, -1)))
        key = attn.norm_k(attn.to_k(others).unflatten(2, (attn.heads, -1)))
        value = attn.to_v(others).unflatten(2, (attn.heads, -1))
        if image_rotary_emb is not None:
            query, key = (
                apply_rotary_emb(heads, image_rotary_emb, use_real_unbind_dim=-2, sequence_dim=1) for heads in (query, key)
            )
        return attn.to_out[0](super().__call__(query, key, value))


class CosmosTransformer3DModel(original.CosmosTransformer3DModel):
    """The class without a padding mask. A latent has no padding here, so the mask's channel is zero."""

    @functools.wraps(original.CosmosTransformer3DModel.__init__)  # the class's arguments are read from it
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        for block in self.transformer_blocks:
            block.attn1.processor, block.attn2.processor = Processor(), Processor()

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Latent [b, C, T, H, W], time [b] or of each frame [b, T], text [b, t, w] -> [b, c, T, H, W]."""
        rows, columns = (size // 2 for size in hidden_states.shape[-2:])
        rotary = self.rope(hidden_states)
        tokens = self.patch_embed(F.pad(hidden_states, (0, 0, 0, 0, 0, 0, 0, 1))).flatten(1, 3)
        times = self.time_embed(tokens, timestep.flatten())
        if timestep.ndim == 2:
            times = (each.unflatten(0, timestep.shape).repeat_interleave(rows * columns, dim=1) for each in times)
        temb, embedded = times
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states, embedded, temb, rotary)
        out = self.proj_out(self.norm_out(tokens, embedded, temb))
        return (rearrange(out, "b (t h w) (p q c) -> b c t (h p) (w q)", h=rows, w=columns, p=2, q=2),)
