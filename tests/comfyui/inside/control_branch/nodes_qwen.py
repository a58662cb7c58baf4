"""Stands in for core's module of this name (0.38): a Fun ControlNet as a patch around blocks, by the names it has there."""

from typing import Any

from . import BlockPatch


class QwenImage21FunControlBlockPatch(BlockPatch):
    kind = "single_block"

    def advance(self, block: Any, stream: Any, args: dict[str, Any]) -> Any:
        more = args["mod"], args["pe"], args["attn_fn"], args["prefix_len"], args["transformer_options"]
        return block(stream, *more)
