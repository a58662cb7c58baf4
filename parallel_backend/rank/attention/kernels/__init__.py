"""The attention kernels, one module each: `attend`, and `attend_lse` if the kernel returns the log-sum-exp.

A module has the name of its row in core/attention_kernels.py, and imports its package when it is called. kernel_choice.py
tries the kernel on the device, and passes it only calls that the kernel supports.

`attend(q_BQHD, k_BKHD, v_BKHD, mask_BK, scale)` returns [B, Q, H, D], attention of every query to all keys. The last axis is
contiguous; the others may have any strides. A kernel must not write to its arguments, because keys and values may be views
of the K/V buffer. `mask_BK`: bool, True for keys that are seen; None: all. Kernels whose row does not say `masks` always get
None. `scale` None: D ** -0.5.

`attend_lse` also returns the natural logarithm of the sum of the scores' exponentials, [B, Q, H] in float32. Entries whose
mask leaves no key get zeros and -inf.
"""
