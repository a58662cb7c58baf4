"""Normalized attention guidance: combines the attention outputs of two sets of batch entries, token by token."""

from collections.abc import Callable

import torch

from parallel_backend.core.block_changes import NormalizedGuidance

LEAST_NORM = 1e-6


def guide(
    out: torch.Tensor,
    guidance: NormalizedGuidance,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> torch.Tensor:
    """Attention outputs [B, n, H, D] of all entries -> the guided one of both sets, [b, n, H, D].

    As ComfyUI's NAGuidance computes it (comfy_extras/nodes_nag.py). `add_up`: sums over the ranks that have other heads.
    """
    positive, negative = out[guidance.positive.slice], out[guidance.negative.slice]
    away = positive * guidance.scale - negative * (guidance.scale - 1)
    sums = [each.abs().sum(dim=(2, 3), keepdim=True, dtype=torch.float32) for each in (positive, away)]
    before, after = add_up(torch.stack(sums)).clamp_min(LEAST_NORM)
    ratio = after / before
    factor = (ratio.clamp_max(guidance.tau) / ratio).to(out.dtype)
    return away * factor * guidance.alpha + positive * (1 - guidance.alpha)
