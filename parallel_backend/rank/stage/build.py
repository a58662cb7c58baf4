"""Builds a pipeline stage from the family's model class. Stand-ins take the place of other stages' blocks.

The class's forward runs on every rank. On the first stage its prologue embeds the inputs. On later stages a stand-in before
the stage's blocks returns the hidden states received. On the last stage the epilogue makes the output. On earlier stages a
stand-in behind the stage's blocks ends the forward with the hidden states to send (block_slots.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core import kitchen
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.spans import Span
from parallel_backend.families.base.blocks import BlockList

from .block_slots import StageIO
from .meta_model import meta_model
from .stand_ins import Placeholder, fill_slots, own_blocks
from .tensor_parallel import TensorPlan
from .weights import StageWeights, read_whole


@dataclass(frozen=True)
class Stage:
    """A stage's model, with its weights in place."""

    model: nn.Module
    attention: list[tuple[nn.Module, str, BlockList, str]]
    """(attention module, its value in BlockList.attention, its list, its block "<list>.<index>"), in the order in which they
    run."""
    stage_io: StageIO
    plan: TensorPlan | None
    """The plan for this model: see TensorPlan.with_outside."""
    blocks: dict[str, nn.Module]
    """The stage's blocks by their names, in the order in which they run."""


def build_stage(
    checkpoint: Checkpoint,
    span: Span,
    device: torch.device,
    dtype_name: str,
    plan: TensorPlan | None = None,
    load: Callable[[StageWeights, Sequence[str]], None] = read_whole,
) -> Stage:
    """The model with weights of the blocks `span` only.

    `load` gets the weights on the meta device and the names "<list>.<index>" of the blocks, and reads them from the mapped
    file to their memory; by default all to `device`. Weights of other ranks are never allocated. With `plan` the rank has
    only its shards, and `Stage.plan.apply` must follow.
    """
    family, config = checkpoint.family, checkpoint.config
    first, last = span.start == 0, span.stop == family.blocks.total(config)
    dtype = compute_dtype(dtype_name, device)
    kitchen.try_kernels(dtype, device)
    model = meta_model(family, config)
    plan = None if plan is None else plan.with_outside(model)
    owned = family.blocks.owned(config, span)
    skipped = (() if first else family.blocks.prologue) + (() if last else family.blocks.epilogue)
    blocks = [
        f"{spec.name}.{index}"
        for spec in family.blocks.lists
        for index in range(len(getattr(model, spec.name)))
        if index in owned[spec.name]
    ]

    def is_local(target: str) -> bool:
        top, _, rest = target.partition(".")
        return f"{top}.{rest.partition('.')[0]}" in blocks if top in owned else top not in skipped

    # The state dict instead of the parameters: a table of positions may be a buffer, which becomes a parameter when loaded.
    targets = [name for name in model.state_dict() if is_local(name)]
    load(StageWeights(model, checkpoint, targets, plan, device, dtype_name), blocks)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    width = family.sizes.hidden(config)
    for name in skipped:
        module, placeholder = getattr(model, name), Placeholder(width, dtype, device)
        if isinstance(module, nn.ModuleDict):
            setattr(model, name, nn.ModuleDict(dict.fromkeys(module, placeholder)))
        else:  # a refiner's blocks need no stand-ins, other modules' outputs must have the right shape
            setattr(model, name, nn.ModuleList() if isinstance(module, nn.ModuleList) else placeholder)
    stage_io, attention = StageIO(family.blocks.text_first), []
    for spec in family.blocks.lists:
        attention += fill_slots(model, spec, stage_io, owned[spec.name], family.forward.whole_latent)
    return Stage(model, attention, stage_io, plan, own_blocks(model, family.blocks.lists))
