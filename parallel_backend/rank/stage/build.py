"""Builds a pipeline stage from diffusers' own, unmodified model class. Stand-ins take the place of other stages' blocks.

The class's forward runs on every rank. On the first stage its prologue embeds the inputs. On later stages a stand-in before
the stage's blocks gives out the hidden states received instead. On the last stage its epilogue makes the output. On earlier
stages a stand-in behind the stage's blocks ends the forward with the hidden states to send (block_slots.py).
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from diffusers.models.embeddings import TimestepEmbedding
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.dtypes import compute_dtype
from parallel_backend.core.spans import Span
from parallel_backend.families import Family
from parallel_backend.families.base.blocks import Values
from parallel_backend.families.base.step_inputs import GUIDANCE

from .block_slots import StageIO
from .meta_model import meta_model
from .stand_ins import Placeholder, fill_slots
from .tensor_parallel import TensorPlan
from .weights import StageWeights, read_whole

GUIDANCE_FACTOR = 1000.0
"""Factor from guidance as users set it to guidance as diffusers' classes embed it."""


@dataclass(frozen=True)
class Stage:
    """A stage's model, with its weights in place."""

    model: nn.Module
    attention: list[tuple[nn.Module, str, Values | None]]
    """(attention module, its value in BlockList.attention, BlockList.values), in the order in which they run."""
    stage_io: StageIO
    plan: TensorPlan | None
    """The given one, for this model: see TensorPlan.with_outside."""


def build_stage(
    checkpoint: Checkpoint,
    span: Span,
    device: torch.device,
    dtype_name: str,
    plan: TensorPlan | None = None,
    load: Callable[[StageWeights, Sequence[str]], None] = read_whole,
    only: Collection[str] = (),
) -> Stage:
    """The model with weights of blocks `span` only.

    Weights go straight from the mapped file to where `load` wants them: it is given them on the meta device, and the names
    "<list>.<index>" of the blocks. Without it they are all on `device`. Nothing that another rank owns is allocated. With
    `plan` the rank has only its shards; `Stage.plan.apply` must follow. `only`: see loading.Load.
    """
    family, config = checkpoint.family, checkpoint.config
    first, last = span.start == 0, span.stop == family.blocks.total(config)
    dtype = compute_dtype(dtype_name, device)
    model = meta_model(family, config)
    plan = None if plan is None else plan.with_outside(model, family.forward.weight_readers)
    owned = family.blocks.owned(config, span)
    skipped = (() if first else family.blocks.prologue) + (() if last else family.blocks.epilogue)
    # The state dict, not the parameters: a table of positions may be a buffer. As loaded it counts as a parameter.
    left_out = {
        f"{spec.name}.{index}."
        for spec in family.blocks.lists
        for index in (owned[spec.name] if only and not spec.prologue else ())
        if f"{spec.name}.{index}" not in only
    }
    targets = [
        name
        for name in model.state_dict()
        if _is_owned(name, owned, skipped) and ".".join([*name.split(".")[:2], ""]) not in left_out
    ]
    weights = StageWeights(model, checkpoint, targets, plan, device, dtype_name)
    blocks = [
        f"{spec.name}.{index}"
        for spec in family.blocks.lists
        for index in range(len(getattr(model, spec.name)))
        if index in owned[spec.name] and f"{spec.name}.{index}." not in left_out
    ]
    load(weights, blocks)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    width = family.sizes.hidden(config)
    for name in skipped:
        # An empty list is enough for a refiner's blocks. Other modules' outputs must have the right shape.
        module = getattr(model, name)
        if isinstance(module, nn.ModuleDict):
            absent = nn.ModuleDict({key: Placeholder(width, dtype, device) for key in module})
        else:
            absent = nn.ModuleList() if isinstance(module, nn.ModuleList) else Placeholder(width, dtype, device)
        setattr(model, name, absent)
    arriving = () if first else family.blocks.carried(config, span.start)
    leaving = () if last else family.blocks.carried(config, span.stop)
    stage_io, attention = StageIO(family.blocks.text_first, arriving, leaving, family.sizes.text_hidden(config)), []
    for spec in family.blocks.lists:
        attention += fill_slots(model, spec, stage_io, owned[spec.name], family.forward.whole_latent, only)
    return Stage(model, attention, stage_io, plan)


def _is_owned(parameter: str, owned: dict[str, range], skipped: tuple[str, ...]) -> bool:
    top, *rest = parameter.split(".")
    if top in owned:
        return int(rest[0]) in owned[top]
    return top not in skipped


def keep_timestep_exact(
    model: nn.Module,
    family: Family,
    values_of: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    dtype: torch.dtype,
) -> None:
    """Give the time embedding the sampler's float32 timestep and guidance, which diffusers would round to `dtype`.

    In bf16 that rounding changes Flux's output by 4 % (timestep) and 7 % (a guidance of 3.5). `values_of()` returns the
    micro-step's timestep and embedded guidance, [b] float32 each, or None without guidance.
    """
    embedding = family.forward.time_embed
    if embedding is None:
        return
    embed = model.get_submodule(embedding.module)
    names = list(inspect.signature(embed.forward).parameters)

    def exact(_module: nn.Module, arguments: tuple) -> tuple:
        timestep, guidance = values_of()
        given = dict(zip(names, arguments, strict=False))
        given[names[0]] = embedding.model_time(timestep) * embedding.factor
        if guidance is not None and given.get(GUIDANCE) is not None:
            given[GUIDANCE] = guidance * GUIDANCE_FACTOR
        return tuple(given.values())

    embed.register_forward_pre_hook(exact)
    for module in embed.modules():
        if isinstance(module, TimestepEmbedding):  # Flux.2 hands it what it computes in the timestep's dtype
            module.register_forward_pre_hook(lambda _module, arguments: (arguments[0].to(dtype), *arguments[1:]))
