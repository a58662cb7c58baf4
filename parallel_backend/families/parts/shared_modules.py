"""Which modules' outputs many micro-steps have in common, so that a rank computes them once (../once.py).

By the names that diffusers gives such modules in all its classes, * for a block (in front) or its index.
tests/rank/test_module_cache.py finds by trial, for every family, which they are.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_backend.families.base.family import Family


class CacheScope(Enum):
    """Which micro-steps have a module's output in common; they have the same conditioning and batch entries in any case."""

    CALL = "call"  # those at one timestep
    PROMPT = "prompt"  # all
    BAND = "band"  # those for the same tokens


_TIMES = (
    *("time_text_embed", "time_guidance_embed", "time_caption_embed", "time_extra_emb", "time_embedding", "t_embedder"),
    *("adaln_single", "condition_embedder", "distilled_guidance_layer"),
)
_MODULATION = (
    *(f"*.{norm}.linear" for norm in ("norm", "norm1", "norm1_context", "norm2")),
    *("*.img_mod", "*.txt_mod", "*.adaLN_modulation", "norm_out.linear", "norm_out.linear_1"),
    *("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"),
)
_TEXT = (
    "caption_projection",
    "text_embedder",
    "cap_embedder",
    "context_refiner.*",
    "patch_embed.text_proj",
    "ofs_embedding",
)
_CROSS_ATTENTION = "attn2"
_TEXT_KEYS = ("to_k", "to_v", "norm_k", "add_k_proj", "add_v_proj", "norm_added_k")


def computed_once(family: "Family") -> Mapping[str, CacheScope]:
    """Module names, as patterns -> how often each is computed. Not every family has all of them."""
    found = dict.fromkeys((*_TIMES, *_MODULATION), CacheScope.CALL) | dict.fromkeys(_TEXT, CacheScope.PROMPT)
    if family.whole_latent:  # every band's forward gets the whole text and grid
        found |= {"context_embedder": CacheScope.CALL, "rope": CacheScope.PROMPT}
    else:
        found |= {"pos_embed": CacheScope.BAND, "rope": CacheScope.BAND}
    if all(_CROSS_ATTENTION not in spec.attention for spec in family.block_lists):
        # Of all blocks at once these are too much to be kept for a whole run: 0.4 GB in a Wan of 14 B.
        found |= {f"*.{_CROSS_ATTENTION}.{name}": CacheScope.CALL for name in _TEXT_KEYS}
    return found
