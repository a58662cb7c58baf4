"""RIFLEx on a MODEL whose weights are on ranks: KJNodes' node puts another module for positions into the native model."""

import math
from typing import Any

from parallel_backend.families import Family
from parallel_backend.families.parts.rope import FREQUENCY

EMBEDDER, CLASS = "diffusion_model.rope_embedder", "EmbedND_RifleX"
"""What the node puts another object in the place of, and that object's class."""
PERIOD = 0.9
"""Of one rotation in the frames that the video has, as KJNodes has it."""


def riflex(family: Family, name: str, module: Any) -> dict[str, tuple[float, float]]:
    """What RIFLEx's module says, as an entry of transformer_options. Empty for other object patches, and for families that
    do not read it."""
    if name != EMBEDDER or type(module).__name__ != CLASS or FREQUENCY not in family.inputs.options:
        return {}
    return {FREQUENCY: (float(module.k - 1), PERIOD * 2 * math.pi / module.num_frames)}
