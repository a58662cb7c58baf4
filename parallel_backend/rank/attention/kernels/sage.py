"""SageAttention: sageattn of the package sageattention (thu-ml/SageAttention). Release 1 has no log-sum-exp, 2 has it.

Release 1 centres keys in place unless smooth_k forbids it, which would change the K/V buffer. Release 2 takes no smooth_k:
its `sageattn` drops options that it does not know, and centres a copy of the keys.
"""

import inspect

from parallel_backend.core.attention_kernels import SAGE_VARIANTS


def attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    from sageattention import sageattn

    return sageattn(q_BQHD, k_BKHD, v_BKHD, tensor_layout="NHD", is_causal=False, sm_scale=scale, smooth_k=False)


def attend_lse(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
    """See kernels/__init__.py. Raises TypeError if the installed release returns no log-sum-exp: release 1 ignores the
    option and returns the output."""
    from sageattention import sageattn

    if "return_lse" not in inspect.signature(sageattn).parameters:
        raise TypeError("this release of sageattention gives no log-sum-exp")
    options = {"tensor_layout": "NHD", "is_causal": False, "sm_scale": scale, "smooth_k": False, "return_lse": True}
    out_BQHD, lse_BHQ = sageattn(q_BQHD, k_BKHD, v_BKHD, **options)
    return out_BQHD, lse_BHQ.transpose(1, 2)  # a natural logarithm


class Variant:
    """The functions of this module with a fixed kernel of release 2, instead of the package's own choice."""

    def __init__(self, variant: str):
        """`variant`: a key of SAGE_VARIANTS."""
        self._name, self._options = SAGE_VARIANTS[variant]

    def attend(self, q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
        return self._call(q_BQHD, k_BKHD, v_BKHD, scale)

    def attend_lse(self, q_BQHD, k_BKHD, v_BKHD, mask_BK, scale):
        out_BQHD, lse_BHQ = self._call(q_BQHD, k_BKHD, v_BKHD, scale, return_lse=True)
        return out_BQHD, lse_BHQ.transpose(1, 2)

    def _call(self, q_BQHD, k_BKHD, v_BKHD, scale, **options):
        """Return the result of the package's function `_name`. Raises ImportError if the installed release does not have
        it."""
        import sageattention

        function = getattr(sageattention, self._name, None)
        if function is None:
            raise ImportError(f"this release of sageattention has no {self._name}")
        return function(
            q_BQHD, k_BKHD, v_BKHD, tensor_layout="NHD", is_causal=False, sm_scale=scale, **self._options, **options
        )
