"""RIFLEx on a MODEL whose weights are on ranks: KJNodes' node replaces the native model's module for positions."""

import math
from collections.abc import Collection
from typing import Any

from parallel_backend.own_class.adapters.wan_forms import FREQUENCY

EMBEDDER, CLASS = "diffusion_model.rope_embedder", "EmbedND_RifleX"
"""The object patch that the node sets, and the class of the object that it puts there."""
PERIOD = 0.9
"""Rotations of the lowest frequency over the whole video, as in KJNodes."""


def riflex(options: Collection[str], name: str, module: Any) -> dict[str, tuple[float, float]]:
    """RIFLEx's settings as an entry of transformer_options. Empty for other object patches, and if the model does not
    support RIFLEx. `options`: this pack's entries of transformer_options that the model's ranks get."""
    if name != EMBEDDER or type(module).__name__ != CLASS or FREQUENCY not in options:
        return {}
    return {FREQUENCY: (float(module.k - 1), PERIOD * 2 * math.pi / module.num_frames)}
