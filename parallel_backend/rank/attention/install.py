"""Puts parallel attention into a model: diffusers' attention dispatcher calls it for the layers of the stage's blocks."""

import functools
from collections.abc import Sequence
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from parallel_backend.families.base.blocks import PAIRED, BlockList, gathers

from .context import AttentionContext
from .parallel_attention import ParallelAttention
from .sdpa_redirect import SdpaProcessor

COARSE_GATE = "to_gate_compress"
"""Layer of an attention module that makes VSA's gate [B, s, heads x D] of the module's input (arXiv 2505.13389)."""


def compute_gate(context: AttentionContext, block: str, module: Any, inputs: tuple) -> None:
    """Hook in front of an attention module: VSA's gate is made of the module's input, where the step's attention is VSA."""
    step = context.step
    if step is None or step.sparse is None:
        return
    settings = step.sparse.settings
    if settings.cubes and block not in settings.full:
        context.gate = getattr(module, COARSE_GATE)(inputs[0])


def install_parallel_attention(
    modules: Sequence[tuple[Any, str, BlockList, str]], context: AttentionContext, gates: bool = True
) -> None:
    """Give each of diffusers' attention modules a ParallelAttention, and route diffusers' native backend through it.

    Modules without one, of another model in the process, keep diffusers' behaviour. `gates`: with VSA's gate. False for
    blocks that are compiled, in which its hook would be traced.
    """
    for layer, (module, over, spec, block) in enumerate(modules):
        if not hasattr(module.processor, "_parallel_config"):
            module.processor = SdpaProcessor(module.processor)
        head_size = module.inner_dim // module.heads if over == PAIRED else 0
        gathered = bool(context.heads) and gathers(over, spec)
        streams = gathered and spec.projections is not None and spec.projections.has_text(module)
        module.processor._parallel_config = ParallelAttention(context, layer, over, head_size, gathered, streams, block)
        module.processor._attention_backend = AttentionBackendName.NATIVE
        if gates and getattr(module, COARSE_GATE, None) is not None and not gathered:
            module.register_forward_pre_hook(functools.partial(compute_gate, context, block))
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
