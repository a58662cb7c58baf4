"""Epsilons of the norms of queries and keys, for `Family.epsilons`. They show where tokens are weak, as in some prompts."""

import torch

_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
FLOAT32 = torch.finfo(torch.float32).eps
UNNAMED = dict.fromkeys(_NORMS, FLOAT32)
"""Of classes of ComfyUI that name none for torch's RMSNorm, which then takes float32's."""
COSMOS = dict.fromkeys(_NORMS, 1e-6)
