"""FlashAttention 3: flash_attn_func of the module flash_attn_interface (Dao-AILab/flash-attention, folder hopper).

Releases differ: the first ones always return the log-sum-exp, some later ones never do, the newest do on request.
"""

import inspect


def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from flash_attn_interface import flash_attn_func

    result = flash_attn_func(q_BQHD, k_BKHD, v_BKHD, softmax_scale=scale)
    return result[0] if isinstance(result, tuple) else result


def attend_lse(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    """See kernels/__init__.py. Raises TypeError if the installed release does not return the log-sum-exp."""
    from flash_attn_interface import flash_attn_func

    on_request = "return_attn_probs" in inspect.signature(flash_attn_func).parameters
    options = {"return_attn_probs": True} if on_request else {}
    result = flash_attn_func(q_BQHD, k_BKHD, v_BKHD, softmax_scale=scale, **options)
    if not isinstance(result, tuple):
        raise TypeError("this release of flash_attn_interface gives no log-sum-exp")
    out_BQHD, lse_BHQ = result[:2]
    return out_BQHD, lse_BHQ.transpose(1, 2)
