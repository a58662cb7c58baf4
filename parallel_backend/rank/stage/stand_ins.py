"""Stand-ins: modules in place of the blocks, prologue and epilogue of other stages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_backend.families.base.blocks import BlockList

from .block_slots import BlockSlot, StageDone, StageIO


class _BlockStandIn(nn.Module):
    """Stands in for the block of `slot`."""

    def __init__(self, slot: BlockSlot):
        super().__init__()
        self.slot = slot


class Upstream(_BlockStandIn):
    """Stands in for a block of an earlier stage: returns the hidden states received."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.slot.emit(*self.slot.stage_io.streams_received())


class Downstream(_BlockStandIn):
    """Stands in for a block of a later stage: ends the forward with the hidden states to send."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise StageDone(*self.slot.streams(self.slot.arguments(args, kwargs)))


class Placeholder(nn.Module):
    """Stands in for a prologue module on a later stage: returns zeros of the hidden width, whose shape alone is used."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.width = width
        self.empty = torch.empty(0, dtype=dtype, device=device)

    def forward(self, value: torch.Tensor | None = None, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        if value is None:
            return self.empty
        return self.empty.new_zeros(*value.shape[:-1], self.width)


STAND_INS = (_BlockStandIn, Placeholder)


def own_blocks(model: nn.Module, specs: Sequence[BlockList]) -> dict[str, nn.Module]:
    """The stage's blocks of these lists, by "<list>.<index>"."""
    blocks = {f"{spec.name}.{index}": block for spec in specs for index, block in enumerate(getattr(model, spec.name))}
    return {name: block for name, block in blocks.items() if not isinstance(block, STAND_INS)}


def fill_slots(
    model: nn.Module, spec: BlockList, stage_io: StageIO, local: range, whole_latent: bool
) -> list[tuple[nn.Module, str, BlockList, str]]:
    """Replace all blocks of a list by stand-ins, except the stage's, whose indices are `local`.

    Returns (attention module, its value in BlockList.attention, its list, its block) of the stage's blocks, in order.
    """
    blocks = getattr(model, spec.name)
    attention = []
    for index, block in enumerate(blocks):
        slot = BlockSlot(spec, stage_io, type(block), index, len(blocks))
        if index in local:
            slot.attach(block, whole_latent)
            modules = dict(block.named_modules())
            attention += [(modules[name], over, spec, slot.name) for name, over in spec.attention.items() if name in modules]
        else:
            blocks[index] = Upstream(slot) if index < local.start else Downstream(slot)
    return attention
