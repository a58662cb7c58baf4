"""torch's scaled dot product attention, on every device: what there always is."""

import torch
import torch.nn.functional as F

from parallel_backend.core.attention_kernels import FLASH_CAPABILITY


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def attend(q, k, v, mask, scale):
    """torch picks among its own kernels."""
    bias = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(*_heads_first(q, k, v), attn_mask=bias, scale=scale).transpose(1, 2)


def attend_lse(q, k, v, mask, scale):
    """torch's own kernels, called by name: its public function keeps the log-sum-exp to itself."""
    q, k, v = _heads_first(q, k, v)
    bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)[:, None, None]
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    elif bias is None and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    else:
        bias = None if bias is None else _aligned(bias).expand(-1, q.shape[1], q.shape[2], -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
        lse = lse[..., : q.shape[2]]  # padded to a multiple of the kernel's tile
    return _without_keyless(out.transpose(1, 2), lse.transpose(1, 2), mask)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The memory-efficient kernel wants rows that start at multiples of 16 bytes: a view of a wider tensor."""
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys]


def _without_keyless(out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Where an entry's mask leaves no key, kernels differ in what they say: zeros and -inf from here on, in place.

    Whether there is such an entry is not asked: the host would wait for the device to say so.
    """
    if mask is None:
        return out, lse
    keyless = ~mask.any(1)
    return out.masked_fill_(keyless[:, None, None, None], 0.0), lse.masked_fill_(keyless[:, None, None], -torch.inf)
