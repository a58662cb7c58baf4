"""A pipeline stage made from diffusers' own, unmodified model class: the parts that are not this rank's are stand-ins.

The class's forward runs on every rank. On the first stage its prologue embeds the inputs; elsewhere a stand-in before the
stage's blocks replaces whatever came of that by the hidden states received. On the last stage its epilogue makes the
output; elsewhere a stand-in behind the stage's blocks ends the forward with the hidden states to send (slots.py).
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint
from .dtypes import compute_dtype
from .families import Family
from .layout import Span
from .skeleton import skeleton
from .slots import Absent, Flow, fill_slots
from .tensor_parallel import TensorPlan
from .weights import fill_weights


@dataclass(frozen=True)
class Stage:
    """`attention`: the attention modules in the order in which they run, each with the tokens it is over (families.base)."""

    model: nn.Module
    attention: list[tuple[nn.Module, str]]
    flow: Flow


def owned_blocks(family: Family, config: dict[str, Any], span: Span) -> dict[str, range]:
    """`span` counts the blocks of all lists through; block list -> which of its own blocks fall into it.

    Lists of the prologue belong to the first stage. An empty range says on which side of it the stage is.
    """
    owned, start, counts = {}, 0, family.blocks(config)
    for spec in family.block_lists:
        if spec.prologue:
            owned[spec.name] = range(sys.maxsize) if span.start == 0 else range(sys.maxsize, sys.maxsize)
            continue
        count = counts[spec.name]
        owned[spec.name] = range(*sorted(min(max(edge - start, 0), count) for edge in (span.start, span.stop)))
        start += count
    return owned


def build_stage(
    checkpoint: Checkpoint, span: Span, device: torch.device, dtype_name: str, plan: TensorPlan | None = None
) -> Stage:
    """The model with only blocks `span` materialised.

    Weights go straight from the mapped file to `device`; nothing that another rank owns is ever allocated. With `plan`
    only this rank's shards of them; `plan.apply` then makes them work together.
    """
    family, config = checkpoint.family, checkpoint.config
    first, last = span.start == 0, span.stop == family.block_count(config)
    dtype = compute_dtype(dtype_name, device)
    model = skeleton(family, config)
    owned = owned_blocks(family, config, span)
    skipped = (() if first else family.prologue) + (() if last else family.epilogue)
    # The state dict, not the parameters: a table of positions may be a buffer. As loaded it counts as a parameter.
    targets = [name for name in model.state_dict() if _is_owned(name, owned, skipped)]
    fill_weights(model, checkpoint, targets, plan, device, dtype_name)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    width = family.hidden(config)
    for name in skipped:
        # A refiner's blocks are simply none, other modules' outputs are looked at for their shape.
        absent = nn.ModuleList() if isinstance(getattr(model, name), nn.ModuleList) else Absent(width, dtype, device)
        setattr(model, name, absent)
    flow, attention = Flow(family.text_first), []
    for spec in family.block_lists:
        attention += fill_slots(model, spec, flow, owned[spec.name], family.whole_latent)
    return Stage(model, attention, flow)


def _is_owned(parameter: str, owned: dict[str, range], skipped: tuple[str, ...]) -> bool:
    top, *rest = parameter.split(".")
    if top in owned:
        return int(rest[0]) in owned[top]
    return top not in skipped


def keep_timestep_exact(model: nn.Module, family: Family, timestep_of: Any) -> None:
    """Hand the time embedding the sampler's float32 timestep: diffusers rounds it to the weights' dtype first.

    In bf16 that rounding moves the output by 4 %; `timestep_of()` gives the current micro-step's [b] float32.
    """
    name, factor = family.time_embed
    model.get_submodule(name).register_forward_pre_hook(lambda _module, arguments: (timestep_of() * factor, *arguments[1:]))
