"""What is added to a model's weights without reading them again: LoRA and its kin, from a checkpoint's keys to layers.

A linear layer computes what is added beside its weight, which stays as it was loaded, packed or not. All other parameters
are small: of those a rank keeps the values that it loaded, and adds to the parameter itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .checkpoint import Checkpoint
from .families.base import Source
from .layout import Shard, Span
from .linear import PackedLinear, RankLinear
from .messages import Adapt
from .tensor_parallel import TensorPlan


@dataclass(frozen=True)
class Delta:
    """`scale` * `up` [rows, r] @ `down` [r, columns], to be added to rows `rows` (None: all) of checkpoint tensor `key`.

    Without `down`, `up` has the shape of those rows. `key` is of the family's original layout.
    """

    key: str
    up: torch.Tensor
    down: torch.Tensor | None = None
    scale: float = 1.0
    rows: Span | None = None


def parameter_parts(checkpoint: Checkpoint, deltas: Iterable[Delta]) -> Iterator[Adapt]:
    """What the deltas add to each of the model's parameters.

    ValueError for a delta whose key or shape is not the checkpoint's, or whose rows belong to no parameter.
    """
    sources: dict[str, list[tuple[str, Source]]] = {}
    for parameter, source in checkpoint.family.recipe(checkpoint.config).items():
        sources.setdefault(source.key, []).append((parameter, source))
    for delta in deltas:
        yield from _parts(checkpoint, sources.get(delta.key, []), delta)


def _parts(checkpoint: Checkpoint, sources: list[tuple[str, Source]], delta: Delta) -> Iterator[Adapt]:
    rows = delta.rows or Span(0, len(delta.up))
    missing = len(rows)
    for parameter, source in sources:
        shape = checkpoint.shape(parameter)
        columns = (torch.Size(shape[1:]).numel(),) if delta.down is not None else shape[1:]
        if len(delta.up) != len(rows) or (delta.up if delta.down is None else delta.down).shape[1:] != columns:
            break
        own = source.rows or Span(0, shape[0])
        common = Span(max(own.start, rows.start), min(own.stop, rows.stop))
        if common.start >= common.stop:
            continue
        up = delta.up[common.shift(-rows.start).slice]
        if common != own:
            whole = up.new_zeros(len(own), *up.shape[1:])
            whole[common.shift(-own.start).slice] = up
            up = whole
        if source.swap_halves:
            up = torch.cat(up.chunk(2)[::-1])
        missing -= len(common)
        yield Adapt(parameter, up, delta.down, delta.scale)
    if missing:
        raise ValueError(
            f"model: what is to be added to {delta.key} does not fit {checkpoint.path.name}. Use a LoRA that was made for "
            "this model."
        )


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a rank has, as the recipe calls them, however they are kept."""
    names = []
    for name, module in model.named_modules():
        packed = isinstance(module, PackedLinear)
        own = [leaf for leaf, _ in module.named_parameters(recurse=False) if not (packed and leaf == "packed")]
        names += [f"{name}.{leaf}" if name else leaf for leaf in own + ["weight"] * packed]
    return tuple(names)


class Adapters:
    """What is added to the parameters of a rank's `model` at present. Factors are kept in its compute dtype.

    Made once its weights are in place and `plan` has been applied: a row-cut layer adds up over the ranks, and a column-cut
    one gathers, what its shard and the adapter's shard give together.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, plan: TensorPlan, device: torch.device, dtype: torch.dtype):
        self._model, self._checkpoint, self._plan = model, checkpoint, plan
        self._device, self._dtype = device, dtype
        self._layers: list[RankLinear] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # parameter -> (as loaded, what is added in float32)
        self.nbytes = 0

    @torch.no_grad()
    def add(self, part: Adapt) -> None:
        """Add to one of the rank's parameters. AttributeError if it has no such parameter."""
        name, _, leaf = part.parameter.rpartition(".")
        layer = self._model.get_submodule(name)
        shape = self._checkpoint.shape(part.parameter)
        shard = self._plan.shards({part.parameter: shape}).get(part.parameter)
        up = part.up.to(self._device, torch.float32) * part.scale
        down = None if part.down is None else part.down.to(self._device, torch.float32)
        if not (isinstance(layer, RankLinear) and leaf == "weight"):
            delta = up if down is None else (up @ down).view(shape)
            self._add_to_values(part.parameter, layer.get_parameter(leaf), _take(delta, shard))
        elif down is None:
            self._add_beside(layer, _take(up, shard).to(self._dtype))
        else:
            up, down = (up, _take(down, shard)) if shard is not None and shard.dim == 1 else (_take(up, shard), down)
            layer.adapters.append((up.to(self._dtype), down.to(self._dtype)))
            self._layers.append(layer)
            self.nbytes += sum(factor.nbytes for factor in layer.adapters[-1])

    @torch.no_grad()
    def drop(self) -> None:
        """Every parameter is as it was loaded, bit for bit."""
        for layer in self._layers:
            layer.adapters.clear()
        for hook in self._hooks:
            hook.remove()
        for parameter, (loaded, _) in self._values.items():
            self._model.get_parameter(parameter).copy_(loaded)
        self._layers, self._hooks, self._values, self.nbytes = [], [], {}, 0

    def _add_to_values(self, name: str, parameter: nn.Parameter, delta: torch.Tensor) -> None:
        if name in self._values:
            loaded, added = self._values[name]
        else:
            loaded, added = parameter.detach().clone(), torch.zeros_like(delta)
            self.nbytes += loaded.nbytes + added.nbytes
        added += delta
        self._values[name] = loaded, added
        parameter.copy_(loaded + added)

    def _add_beside(self, layer: RankLinear, delta: torch.Tensor) -> None:
        # Before the hooks of tensor parallelism, which add up or gather what the layer and this give together.
        hook = layer.register_forward_hook(lambda _layer, given, out: out + F.linear(given[0], delta), prepend=True)
        self._hooks.append(hook)
        self.nbytes += delta.nbytes


def _take(values: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """The rank's part; of a factor too, whose uncut side is its rank."""
    if shard is None:
        return values
    return torch.cat([values.narrow(shard.dim, span.start, len(span)) for span in shard.spans], shard.dim)
