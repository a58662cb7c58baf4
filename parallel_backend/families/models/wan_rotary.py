"""Wan's self-attention with a cheaper rotary embedding than diffusers' attention processor has."""

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor


class RotaryProcessor(WanAttnProcessor):
    """diffusers' processor with a rotary embedding that is one product of complex numbers, instead of six of strided halves.

    diffusers' products read and write every second value, which on a CPU took a rank 4 % of Wan's step in bf16.
    """

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[b, n, hidden] -> the same shape. `rotary_emb`: see `rotated`; None in cross-attention."""
        # torch.compile fuses diffusers' products and cannot make code for complex numbers.
        if rotary_emb is None or torch.compiler.is_compiling():
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        query = rotated(heads(attn, attn.norm_q(attn.to_q(hidden_states))), *rotary_emb)
        key = rotated(heads(attn, attn.norm_k(attn.to_k(hidden_states))), *rotary_emb)
        value, backend, parallel = heads(attn, attn.to_v(hidden_states)), self._attention_backend, self._parallel_config
        out = dispatch_attention_fn(query, key, value, attention_mask, backend=backend, parallel_config=parallel)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))


def heads(attn: WanAttention, x: torch.Tensor) -> torch.Tensor:
    """[b, n, H D] -> [b, n, H, D]."""
    return x.unflatten(2, (attn.heads, -1))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[b, n, heads, d] with each pair of neighbouring values turned, in float32, rounded once.

    `cos`, `sin` [1, n, 1, d]: each pair has its value twice.
    """
    turn = torch.complex(cos[..., 0::2].float(), sin[..., 0::2].float())
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)
