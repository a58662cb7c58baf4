"""diffusers' own context parallelism, Ulysses and ring, on CPU processes over Gloo.

As shipped (diffusers 0.42) it does not run on CPUs. `adapt` changes two things, in these processes only; the model, its
plan, the collectives and the arithmetic around the attention are diffusers' own, with its defaults.
"""

from typing import Any

import torch
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch

shipped_attention = attention_dispatch._native_attention_forward_op


def attention_with_lse(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    **context: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As diffusers calls its attention ops: [B, n, heads, d] x 3 -> the same, and log-sum-exp [B, n, heads] if asked."""
    if not return_lse:
        return shipped_attention(ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **context)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def adapt() -> None:
    """The two things without which it stops on a CPU."""
    # `enable_parallelism` computes `rank % torch.accelerator.device_count()`, which is 0 here. The device that it makes
    # of it ("cpu", the accelerator type torch reports) is only noted in the config.
    torch.accelerator.device_count = lambda: 1
    # The ring joins its chunks by their log-sum-exp. "native", the only backend for context parallelism that takes fp32
    # on a CPU, refuses to return it, although the kernel behind it computes it: the same kernel, then, called by name.
    # Ulysses asks for none and runs what is shipped.
    attention_dispatch._native_attention_forward_op = attention_with_lse


def parallel(model: torch.nn.Module, mode: str, ranks: int) -> torch.nn.Module:
    """The model, cut over all ranks of the default group by diffusers: `mode` is ulysses or ring."""
    adapt()
    model.enable_parallelism(config=ContextParallelConfig(**{f"{mode}_degree": ranks}))
    return model
