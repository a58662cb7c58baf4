"""Normalized attention guidance in a class that hands what its attention gives to other nodes' functions.

The class decides which calls of attention it hands over, and says which tokens are the image's. A rank gives it a function
that guides the rank's own tokens and heads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.residuals import PATCHES
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.token_cut import TokenCut

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


GUIDED = "parallel_dit_guided"
"""Entry of transformer_options on ranks and in trials: NormalizedGuidance."""
OUTPUT = "attn1_output_patch"
"""ComfyUI's kind of patches that get the output of attention."""
IMAGE = "img_slice"
"""Entry in the options of such a patch: (first image token, token behind the last one)."""
Sum = Callable[[torch.Tensor], torch.Tensor]
"""Adds up tensors over ranks with other heads."""


def own_sums(sums: torch.Tensor) -> torch.Tensor:
    """The Sum of a rank that has all heads."""
    return sums


class Guide:
    """The function. A stage has one for all calls, as compiled blocks need."""

    def __init__(self, guidance: NormalizedGuidance | None = None):
        self._guidance = guidance
        self._add_up: Sum = own_sums
        self._tokens: TokenCut | None = None

    def options(self, options: Mapping[str, Any], tokens: TokenCut | None, add_up: Sum) -> dict[str, Any]:
        """What the class gets in place of `options`, which have GUIDED. `tokens`: cuts them in the call that begins."""
        self._guidance, self._tokens, self._add_up = options[GUIDED], tokens, add_up
        others = {name: value for name, value in options.items() if name != GUIDED}
        return others | {PATCHES: options.get(PATCHES, {}) | {OUTPUT: [self]}}

    @torch.compiler.disable  # ranks add up in it
    def __call__(self, out_BSC: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Guides the image's tokens in place, of both prompts. If the class does not say which tokens these are, all of the
        positive prompt, as ComfyUI's node does."""
        guidance, add_up = self._guidance, self._add_up
        assert guidance is not None, "the class calls it within a call that is guided"
        positive, negative = guidance.positive.slice, guidance.negative.slice
        if out_BSC.ndim != 3 or len(out_BSC) < max(guidance.positive.stop, guidance.negative.stop):
            raise Unproven("its guided attention does not return [B, S, C]")
        image = options.get(IMAGE)
        rows, mask_s1 = (slice(None), None) if image is None else self._rows(Span(*image), out_BSC)
        both = [out_BSC[entries, rows] for entries in (positive, negative)]
        settings = guidance.scale, guidance.tau, guidance.alpha
        guided = normalized(both[0][:, :, None], both[1][:, :, None], *settings, add_up)[:, :, 0]
        for entries, own in zip((positive, negative)[: 1 if image is None else 2], both, strict=False):
            out_BSC[entries, rows] = guided if mask_s1 is None else torch.where(mask_s1, guided, own)
        return out_BSC

    def _rows(self, image: Span, out_BSC: torch.Tensor) -> tuple[slice, torch.Tensor | None]:
        """(rows of `out_BSC` that have all of the rank's image, [s, 1] bool: which of them are the image's). None: all."""
        mask = None if self._tokens is None else self._tokens.which_own(image, out_BSC.shape[1], out_BSC.device)
        return (image.slice, None) if mask is None else (slice(None), mask[:, None])
