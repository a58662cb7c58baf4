"""Stands in for core's module of this name (0.38): a Fun ControlNet as a patch around blocks, by the names it has there."""

from typing import Any

from . import BlockPatch


class MiniMaxH3FunControlBlockPatch(BlockPatch):
    kind = "double_block"

    def advance(self, block: Any, stream: Any, args: dict[str, Any]) -> Any:
        return block(stream, args["t_emb"], args["mod_segments"], args["rope_freqs"], args["transformer_options"])
