"""Blocks that read the text by cross attention (Wan, LTX-Video): `attn1` over the image's tokens, `attn2` to the text.

Their query and key norms are over all heads at once.
"""

from collections.abc import Mapping

from ..tensor_parallel import COLUMN, COLUMN_BY_HEADS, NORM_BY_HEADS, ROW, ROW_BY_HEADS, Style
from .base import JOINT, BlockList, Cut

_COLUMNS = [f"{attention}.to_{part}" for attention in ("attn1", "attn2") for part in "qkv"]
_NORMS = [f"{attention}.norm_{part}" for attention in ("attn1", "attn2") for part in "qk"]


def block_list(name: str, cuts: Mapping[str, Cut]) -> BlockList:
    """`cuts`: see BlockList."""
    return BlockList(name, returns=("image",), cuts=cuts, attention={"attn1": JOINT})


def block_plan(feed_forward: str) -> dict[str, Style]:
    """How a block is cut for tensor parallelism. `feed_forward`: its name in the block."""
    return {
        **dict.fromkeys([*_COLUMNS, "attn2.add_k_proj", "attn2.add_v_proj"], COLUMN_BY_HEADS),
        **dict.fromkeys([*_NORMS, "attn2.norm_added_k"], NORM_BY_HEADS),
        **dict.fromkeys(("attn1.to_out.0", "attn2.to_out.0"), ROW_BY_HEADS),
        f"{feed_forward}.net.0.proj": COLUMN,
        f"{feed_forward}.net.2": ROW,
    }
