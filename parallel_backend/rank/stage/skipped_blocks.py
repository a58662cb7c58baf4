"""Blocks that a model call skips: for its micro-steps they give out what they are given."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from parallel_backend.families.base.blocks import BlockList

from .block_slots import BlockSlot, StageIO
from .stand_ins import own_blocks


class SkippableBlocks:
    """The stage's own blocks of these lists. Their hooks run in any case: what surrounds a block does not know."""

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
        """Within it the blocks "<list>.<index>" of `names` that are the stage's are skipped."""
        skipped = [self._blocks[name] for name in names if name in self._blocks]
        forwards = [vars(block).get("forward") for block in skipped]  # a compiled one is the module's own
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
