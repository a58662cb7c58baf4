"""How many tokens a call's reference pictures and videos have."""

import math
from collections.abc import Mapping
from typing import Any

from ..base.family import Family


def reference_tokens(family: Family, call: Mapping[str, Any]) -> int:
    """Number of reference tokens of a model call, from the latents that `Inputs.references` names."""
    latents, patching = family.inputs.references(call), family.patching
    videos = (latent.unsqueeze(2) if patching.video and latent.ndim == 4 else latent for latent in latents)
    return sum(math.prod(patching.grid(tuple(latent.shape))) for latent in videos)
