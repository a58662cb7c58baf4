"""torch's scaled dot product attention, which runs on every device."""

import torch
import torch.nn.functional as F

from parallel_backend.core.attention_kernels import FLASH_CAPABILITY


def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    """Attention by torch's public function, which chooses one of torch's kernels."""
    mask_B11K = None if mask_BK is None else mask_BK[:, None, None]
    q_BHQD, k_BHKD, v_BHKD = q_BQHD.transpose(1, 2), k_BKHD.transpose(1, 2), v_BKHD.transpose(1, 2)
    return F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=mask_B11K, scale=scale).transpose(1, 2)


def attend_lse(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    """Attention and log-sum-exp by torch's private kernels, because the public function does not return the log-sum-exp."""
    # Not by torch.ops.aten, whose calls take 5 us longer on the host.
    q_BHQD, kv_BHKD = q_BQHD.transpose(1, 2), (k_BKHD.transpose(1, 2), v_BKHD.transpose(1, 2))
    dtype, bias_B11K = q_BQHD.dtype, None
    if mask_BK is not None:
        bias_B11K = torch.zeros_like(mask_BK, dtype=dtype).masked_fill_(~mask_BK, -torch.inf)[:, None, None]
    if not q_BHQD.is_cuda:
        out_BHQD, lse_BHQ = torch._scaled_dot_product_flash_attention_for_cpu(
            q_BHQD, *kv_BHKD, attn_mask=bias_B11K, scale=scale
        )
    elif (
        bias_B11K is None and dtype != torch.float32 and torch.cuda.get_device_capability(q_BHQD.device) >= FLASH_CAPABILITY
    ):
        out_BHQD, lse_BHQ, *_ = torch._scaled_dot_product_flash_attention(q_BHQD, *kv_BHKD, scale=scale)
    else:
        bias_BHQK = None if bias_B11K is None else _aligned(bias_B11K).expand(-1, *q_BHQD.shape[1:3], -1)
        out_BHQD, lse_BHQ, *_ = torch._scaled_dot_product_efficient_attention(q_BHQD, *kv_BHKD, bias_BHQK, True, scale=scale)
        lse_BHQ = lse_BHQ[..., : q_BHQD.shape[2]]  # padded to a multiple of the kernel's tile
    return _without_keyless(out_BHQD.transpose(1, 2), lse_BHQ.transpose(1, 2), mask_BK)


def _aligned(bias_B11K: torch.Tensor) -> torch.Tensor:
    """The bias as a view of a wider tensor: the memory-efficient kernel needs rows that start at multiples of 16 bytes."""
    keys = bias_B11K.shape[-1]
    return F.pad(bias_B11K, (0, -keys % 16))[..., :keys]


def _without_keyless(
    out_BQHD: torch.Tensor, lse_BQH: torch.Tensor, mask_BK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set entries whose mask leaves no key to zeros and -inf, in place, because kernels differ there."""
    if mask_BK is None:
        return out_BQHD, lse_BQH
    # Filled without asking whether there is such an entry: the host would have to wait for the device to know.
    keyless_B111 = ~mask_BK.any(1)[:, None, None, None]
    return out_BQHD.masked_fill_(keyless_B111, 0.0), lse_BQH.masked_fill_(keyless_B111[..., 0], -torch.inf)
