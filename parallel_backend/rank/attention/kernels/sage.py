"""SageAttention: sageattn of the package sageattention (thu-ml/SageAttention). Release 1 has no log-sum-exp, 2 has it.

Keys are not centred before they are quantised (smooth_k), as in ComfyUI. Release 1 would centre them in place, which would
change the K/V buffer.
"""

import inspect


def attend(q, k, v, mask, scale):
    from sageattention import sageattn

    return sageattn(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=scale, smooth_k=False)


def attend_lse(q, k, v, mask, scale):
    """TypeError where this release does not give the log-sum-exp: release 1 takes any option, and gives the output alone."""
    from sageattention import sageattn

    if "return_lse" not in inspect.signature(sageattn).parameters:
        raise TypeError("this release of sageattention gives no log-sum-exp")
    out, lse = sageattn(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=scale, smooth_k=False, return_lse=True)
    return out, lse.transpose(1, 2)  # [B, H, q], a natural logarithm
