"""Normalized attention guidance (arXiv 2505.21179): an attention output is moved away from a second one."""

from collections.abc import Callable

import torch

LEAST_NORM = 1e-6


def normalized(
    positive: torch.Tensor,
    negative: torch.Tensor,
    scale: float | torch.Tensor,
    tau: float | torch.Tensor,
    alpha: float | torch.Tensor,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> torch.Tensor:
    """Two [b, n, H, D] -> [b, n, H, D], as ComfyUI's NAGuidance computes it (comfy_extras/nodes_nag.py).

    `scale`, `tau`, `alpha`: see NormalizedGuidance; numbers, or [b, 1, 1, 1]. `add_up`: sum over ranks with other heads.
    """
    away = positive * scale - negative * (scale - 1)
    sums = [each.abs().sum(dim=(2, 3), keepdim=True, dtype=torch.float32) for each in (positive, away)]
    before, after = add_up(torch.stack(sums)).clamp_min(LEAST_NORM)
    ratio = after / before
    factor = (ratio.clamp(max=tau) / ratio).to(away.dtype)
    return away * factor * alpha + positive * (1 - alpha)
