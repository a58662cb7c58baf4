"""The attention function of the classes in this package. Ranks replace it with their own (core/own_class.py)."""

import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: object = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
) -> torch.Tensor:
    """[B, S, H x D] each, or with `skip_reshape` [B, H, S, D] -> [B, S, H x D], or with `skip_output_reshape` [B, H, S, D].

    The signature is that of ComfyUI's functions. `mask`: bool, of keys that are seen, [B, 1, 1, S]. `attn_precision` changes
    nothing.
    """
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out_BHSD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out_BHSD if skip_output_reshape else out_BHSD.transpose(1, 2).flatten(2)
