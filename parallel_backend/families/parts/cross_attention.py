"""Blocks that read the text by cross-attention (Wan, PixArt).

Their `attn1` is self-attention over the image's tokens, their `attn2` looks at the text.
"""

from typing import Any

from ..base.blocks import JOINT, BlockList
from ..base.family import cached
from ..base.tensor_plan import COLUMN, COLUMN_BY_HEADS, NORM_BY_HEADS, ROW, ROW_BY_HEADS, LayerCut

_COLUMNS = [f"{attention}.to_{part}" for attention in ("attn1", "attn2") for part in "qkv"]
_NORMS = [f"{attention}.norm_{part}" for attention in ("attn1", "attn2") for part in "qk"]

TEXT_KEYS = cached(
    call=[f"*.attn2.{name}" for name in ("to_k", "to_v", "norm_k", "add_k_proj", "add_v_proj", "norm_added_k")]
)
"""`Forward.cached_modules`: keys and values of the text, which every band shares. Not every class has all of these modules.
Kept for a call, not for the whole run, since all blocks' together are large: 0.4 GB in a Wan of 14 B."""


def block_list(name: str, **others: Any) -> BlockList:
    """A list of blocks with cross-attention. `others`: further fields of BlockList."""
    return BlockList(name, returns=("image",), attention={"attn1": JOINT}, **others)


def block_plan(feed_forward: str) -> dict[str, LayerCut]:
    """Tensor plan of a block with cross-attention. `feed_forward`: name of that module in the block. Norms of queries and
    keys are taken over all heads together."""
    return {
        **dict.fromkeys([*_COLUMNS, "attn2.add_k_proj", "attn2.add_v_proj"], COLUMN_BY_HEADS),
        **dict.fromkeys([*_NORMS, "attn2.norm_added_k"], NORM_BY_HEADS),
        **dict.fromkeys(("attn1.to_out.0", "attn2.to_out.0"), ROW_BY_HEADS),
        f"{feed_forward}.net.0.proj": COLUMN,
        f"{feed_forward}.net.2": ROW,
    }
