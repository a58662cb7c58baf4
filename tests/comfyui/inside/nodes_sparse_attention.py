"""Stands in for core's module of this name: what Model Sparse Attention puts on a MODEL, by the names it has there.

Its kernel, comfy-kitchen's, is replaced by the script. Core's runs on GPUs only, and attends in full elsewhere.
"""

from types import SimpleNamespace
from typing import Any

import comfy_kitchen


def settings(**changed: Any) -> SimpleNamespace:
    usual = {"tau": 1.3, "topk_ratio": 0.0, "extra_tokens": 256, "vsa": False, "sigma_start": 1e9, "sigma_end": 0.0}
    return SimpleNamespace(**usual | {"min_tokens": 0, "dense_blocks": set(), "sink_conditioning": "off"} | changed)


def make_attention_override(patch: SimpleNamespace, previous: Any):
    def override(func, q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **named):
        sigma = float(named["transformer_options"]["sigmas"][0])
        if skip_reshape:
            queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        else:
            queries, keys, values = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
        tokens = queries.shape[1]
        full = mask is not None or queries.shape != keys.shape or tokens < patch.min_tokens
        if full or not patch.sigma_end <= sigma <= patch.sigma_start:
            named |= {"mask": mask, "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return func(q, k, v, heads, **named) if previous is None else previous(func, q, k, v, heads, **named)
        out = comfy_kitchen.sol_attn(
            queries,
            keys,
            values,
            tau=patch.tau,
            scale=named.get("scale"),
            sink_blocks=[0, 0],
            sink_q=[0, 0],
            topk_ratio=patch.topk_ratio,
            token_aug=patch.extra_tokens,
        )
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    return override


def apply(model: Any, patch: SimpleNamespace) -> Any:
    """The MODEL with the node's override on top of what it has."""
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    options["optimized_attention_override"] = make_attention_override(patch, options.get("optimized_attention_override"))
    return clone
