"""Blocks that a model call skips: in its micro-steps they return their inputs."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from parallel_backend.families.base.blocks import BlockList

from .block_slots import BlockSlot, StageIO
from .stand_ins import own_blocks


class SkippableBlocks:
    """The stage's blocks of these lists. A skipped block's hooks run: they fetch weights and add residuals."""

    def __init__(self, model: nn.Module, specs: tuple[BlockList, ...], stage_io: StageIO):
        self._blocks = own_blocks(model, specs)
        self._slots: dict[str, BlockSlot] = {}
        for spec in specs:
            count = len(getattr(model, spec.name))
            for index, block in enumerate(getattr(model, spec.name)):
                if (name := f"{spec.name}.{index}") in self._blocks:
                    self._slots[name] = BlockSlot(spec, stage_io, type(block), index, count)

    @contextmanager
    def skipping(self, names: Collection[str]) -> Iterator[None]:
        """Within it the blocks "<list>.<index>" of `names` are skipped. Other stages' blocks are ignored."""
        skipped = [self._blocks[name] for name in names if name in self._blocks]
        forwards = [vars(block).get("forward") for block in skipped]  # a compiled forward is an attribute of its module
        for name in names:
            if name in self._blocks:
                self._blocks[name].forward = self._slots[name].unchanged
        try:
            yield
        finally:
            for block, forward in zip(skipped, forwards, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward
