"""Packages of attention kernels where there are none: signatures, layouts and log-sum-exps as the real ones have them.

Layouts are told apart by their sizes, so a mix-up is an error or a wrong result. Signatures are those of flash-attn 2.8.3,
its hopper folder, sageattention 1.0.6 and 2.2, comfy-kitchen 0.2.31 and xformers 0.0.35. What they cannot show: the kernels.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

LOG2_E = 1.4426950408889634


def exactly(q, k, v, scale=None, mask=None):
    """[B, q, H, D], two of [B, k, H, D] -> [B, q, H, D] and the log-sum-exp [B, H, q], by the definition."""
    assert q.shape[-2:] == k.shape[-2:] == v.shape[-2:] and k.shape == v.shape and q.stride(-1) == k.stride(-1) == 1
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    return out.to(q.dtype), scores.logsumexp(-1).float()


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn, which in early releases rounded the log-sum-exp's queries up."""
    out, lse = exactly(q, k, v, softmax_scale)
    return (out, F.pad(lse, (0, -lse.shape[-1] % 128)), None) if return_attn_probs else out


def flash3_first(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):
    """flash_attn_interface, as it was first."""
    return exactly(q, k, v, softmax_scale)


def flash3_without(q, k, v, softmax_scale=None, causal=False, qv=None, num_splits=1, pack_gqa=None, sm_margin=0):
    """flash_attn_interface as in 2.8.3."""
    return exactly(q, k, v, softmax_scale)[0]


def flash3_asked(q, k, v, softmax_scale=None, causal=False, qv=None, sm_margin=0, return_attn_probs=False):
    """flash_attn_interface, since."""
    both = exactly(q, k, v, softmax_scale)
    return both if return_attn_probs else both[0]


def _sage(q, k, v, tensor_layout, sm_scale):
    if tensor_layout == "HND":
        out, lse = exactly(*(x.transpose(1, 2) for x in (q, k, v)), sm_scale)
        return out.transpose(1, 2), lse
    return exactly(q, k, v, sm_scale)


def sageattn_1(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs: Any):
    """Release 1: three head sizes, keys centred in place, other options taken and ignored."""
    assert q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]."
    if smooth_k:
        k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
    return _sage(q, k, v, tensor_layout, sm_scale)[0]


def sageattn_2(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs: Any):
    """Release 2: the log-sum-exp is a natural logarithm."""
    if q.shape[-1] > 128:
        raise ValueError(f"Unsupported head_dim: {q.shape[-1]}")
    both = _sage(q, k, v, tensor_layout, sm_scale)
    return both if return_lse else both[0]


def sageattn_qk_int8_pv_fp8_cuda(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    qk_quant_gran="per_thread",
    sm_scale=None,
    pv_accum_dtype="fp32+fp16",
    smooth_k=True,
    smooth_v=False,
    return_lse=False,
    **kwargs: Any,
):
    """Of release 2, which others of its ways are called like."""
    both = _sage(q, k, v, tensor_layout, sm_scale)
    return both if return_lse else both[0]


def int8_attention(q, k, v, *, scale=None, attn_mask=None):
    """comfy_kitchen: heads first, masks that broadcast to [B, H, q, k]."""
    if not all(q.shape) or not all(k.shape):
        raise ValueError("batch, head counts, and sequence lengths must be positive")
    if attn_mask is not None:
        attn_mask = torch.broadcast_to(attn_mask, (*q.shape[:3], k.shape[2]))
    return exactly(*(x.transpose(1, 2) for x in (q, k, v)), scale, attn_mask)[0].transpose(1, 2)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    return exactly(query, key, value, scale)[0]


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    """xformers.ops, whose CUTLASS kernel rounds the log-sum-exp's queries up."""
    out, lse = exactly(query, key, value, scale)
    return out, F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """`module`, such as xformers.ops, has these functions and nothing else until the test ends."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:count]))
        made.__path__ = []
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name, function in functions.items():
        setattr(made, name, function)


PACKAGES = {
    "flash": ("flash", "flash_attn", {"flash_attn_func": flash_attn_func}),
    "flash3 first": ("flash3", "flash_attn_interface", {"flash_attn_func": flash3_first}),
    "flash3 without": ("flash3", "flash_attn_interface", {"flash_attn_func": flash3_without}),
    "flash3 asked": ("flash3", "flash_attn_interface", {"flash_attn_func": flash3_asked}),
    "sage 1": ("sage", "sageattention", {"sageattn": sageattn_1}),
    "sage 2": ("sage", "sageattention", {"sageattn": sageattn_2}),
    "comfy_kitchen": ("comfy_kitchen", "comfy_kitchen", {"int8_attention": int8_attention}),
    "xformers": (
        "xformers",
        "xformers.ops",
        {
            "memory_efficient_attention": memory_efficient_attention,
            "memory_efficient_attention_forward_requires_grad": memory_efficient_attention_forward_requires_grad,
        },
    ),
}
"""Kernel, module and functions."""
WITHOUT_LSE = ("flash3 without", "sage 1", "comfy_kitchen")
