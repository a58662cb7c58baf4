"""Puts parallel attention into a model: diffusers' attention dispatcher calls it for the layers of the stage's blocks."""

from collections.abc import Sequence
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from parallel_backend.families.base.blocks import PAIRED, BlockList

from .context import AttentionContext
from .parallel_attention import ParallelAttention


def install_parallel_attention(modules: Sequence[tuple[Any, str, BlockList, str]], context: AttentionContext) -> None:
    """Give each of diffusers' attention modules a ParallelAttention, and route diffusers' native backend through it.

    Modules without one, of another model in the process, keep diffusers' behaviour.
    """
    for layer, (module, over, _, block) in enumerate(modules):
        head_size = module.inner_dim // module.heads if over == PAIRED else 0
        module.processor._parallel_config = ParallelAttention(context, layer, over, head_size, block)
        module.processor._attention_backend = AttentionBackendName.NATIVE
    registry = _AttentionBackendRegistry._backends
    native = registry[AttentionBackendName.NATIVE]
    if getattr(native, "knows_parallel_attention", False):
        return

    def dispatch(query, key, value, attn_mask=None, scale=None, _parallel_config=None, **options):
        if not hasattr(_parallel_config, "attend"):
            return native(query, key, value, attn_mask=attn_mask, scale=scale, _parallel_config=_parallel_config, **options)
        return _parallel_config.attend(query, key, value, scale, attn_mask)

    dispatch.knows_parallel_attention = True
    registry[AttentionBackendName.NATIVE] = dispatch
