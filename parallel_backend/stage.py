"""A pipeline stage made from diffusers' own, unmodified model class: the parts that are not this rank's are stand-ins.

The class's forward runs on every rank. On the first stage its prologue embeds the inputs; elsewhere `Ingress`, put in
front of the stage's blocks, replaces whatever came before by the hidden states received. On the last stage its epilogue
makes the output; elsewhere `Egress`, behind the stage's blocks, ends the forward with the hidden states to send.
"""

from typing import Any

import diffusers
import torch
from diffusers.hooks import apply_layerwise_casting
from torch import nn

from .checkpoint import Checkpoint
from .dtypes import TORCH_DTYPES, compute_dtype
from .families import Family
from .layout import Span
from .tensor_parallel import TensorPlan


class StageDone(Exception):
    """No error: ends the forward of a stage without epilogue, carrying [b, t, hidden] and [b, n, hidden] out of it."""

    def __init__(self, text: torch.Tensor, image: torch.Tensor):
        self.text, self.image = text, image


class Ingress(nn.Module):
    """Stands in for all blocks of the stages before. `received`: [b, t + n, hidden], text first, set per micro-step."""

    def __init__(self):
        super().__init__()
        self.received: torch.Tensor | None = None
        self.text_tokens = 0

    def forward(self, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.received is not None
        return self.received[:, : self.text_tokens], self.received[:, self.text_tokens :]


class Egress(nn.Module):
    """Stands in for all blocks of the stages after, and for the epilogue."""

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **_kwargs: Any) -> None:
        raise StageDone(encoder_hidden_states, hidden_states)


class Absent(nn.Module):
    """Stands in for a prologue module on a later stage. Its output is never read, only its dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.empty = torch.empty(0, dtype=dtype, device=device)

    def forward(self, *_args: Any) -> torch.Tensor:
        return self.empty


def owned_blocks(family: Family, config: dict[str, Any], span: Span) -> dict[str, Span]:
    """`span` counts the blocks of all lists through; block list -> the span of its own blocks that falls into it."""
    owned, start = {}, 0
    for name, count in family.blocks(config).items():
        inside = sorted((min(max(edge - start, 0), count)) for edge in (span.start, span.stop))
        owned[name] = Span(*inside)
        start += count
    return owned


def build_stage(
    checkpoint: Checkpoint, span: Span, device: torch.device, dtype_name: str, plan: TensorPlan | None = None
) -> tuple[nn.Module, list[nn.Module], Ingress | None]:
    """The model with only blocks `span` materialised: (model, its attention modules in order, its Ingress if not first).

    Weights go straight from the mapped file to `device`; nothing that another rank owns is ever allocated. With `plan`
    only this rank's shards of them; `plan.apply` then makes them work together.
    """
    family, config = checkpoint.family, checkpoint.config
    first, last = span.start == 0, span.stop == family.block_count(config)
    dtype = compute_dtype(dtype_name, device)
    with torch.device("meta"):
        model = getattr(diffusers, family.model_class)(**config).eval().requires_grad_(False)
    owned = owned_blocks(family, config, span)
    skipped = (() if first else family.prologue) + (() if last else family.epilogue)
    storage = TORCH_DTYPES[dtype_name] if dtype_name.startswith("fp8") else dtype
    # The state dict, not the parameters: a table of positions may be a buffer. As loaded it counts as a parameter.
    wanted = {
        name: storage if _is_cast(model, name) else dtype for name in model.state_dict() if _is_owned(name, owned, skipped)
    }
    shards = {} if plan is None else plan.shards({name: checkpoint.shape(name) for name in wanted})
    for name in [name for name, shard in shards.items() if not shard.spans]:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, None)
        del wanted[name]
    for name, values in checkpoint.read(wanted, shards, device).items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(values, requires_grad=False))

    attention = []
    for name, blocks in owned.items():
        kept = [getattr(model, name)[index] for index in range(blocks.start, blocks.stop)]
        attention += [module for block in kept for module in block.modules() if hasattr(module, "processor")]
        setattr(model, name, nn.ModuleList(kept))
    for name in skipped:
        setattr(model, name, Absent(dtype, device))
    ingress = None
    if not first:
        ingress = Ingress()
        getattr(model, family.block_lists[0]).insert(0, ingress)
    if not last:
        getattr(model, family.block_lists[-1]).append(Egress())
    if storage != dtype:
        # Not the model's own method: that skips every module with "norm" in its name, a quarter of Flux's weights.
        apply_layerwise_casting(model, storage, dtype, skip_modules_pattern=None, skip_modules_classes=(nn.Conv2d,))
    return model, attention, ingress


def _is_cast(model: nn.Module, parameter: str) -> bool:
    """Layerwise casting serves linear layers; the weights of norms stay in the compute dtype."""
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), nn.Linear)


def _is_owned(parameter: str, owned: dict[str, Span], skipped: tuple[str, ...]) -> bool:
    top, *rest = parameter.split(".")
    if top in owned:
        return owned[top].start <= int(rest[0]) < owned[top].stop
    return top not in skipped


def keep_timestep_exact(model: nn.Module, family: Family, timestep_of: Any) -> None:
    """Hand the time embedding the sampler's float32 timestep: diffusers rounds it to the weights' dtype first.

    In bf16 that rounding moves the output by 4 %; `timestep_of()` gives the current micro-step's [b] float32.
    """
    name, factor = family.time_embed
    model.get_submodule(name).register_forward_pre_hook(lambda _module, arguments: (timestep_of() * factor, *arguments[1:]))
