"""FlashAttention 3: flash_attn_func of the module flash_attn_interface (Dao-AILab/flash-attention, folder hopper).

Its releases differ: the first ones always give the log-sum-exp too, then some never do, then those asked for it.
"""

import inspect


def attend(q, k, v, mask, scale):
    from flash_attn_interface import flash_attn_func

    result = flash_attn_func(q, k, v, softmax_scale=scale)
    return result[0] if isinstance(result, tuple) else result


def attend_lse(q, k, v, mask, scale):
    """TypeError where this release does not give the log-sum-exp."""
    from flash_attn_interface import flash_attn_func

    asked = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(flash_attn_func).parameters else {}
    result = flash_attn_func(q, k, v, softmax_scale=scale, **asked)
    if not isinstance(result, tuple):
        raise TypeError("this release of flash_attn_interface gives no log-sum-exp")
    return result[0], result[1].transpose(1, 2)  # [B, H, q]
