"""LoRA and other additions to a rank's weights, made without reading the weights again.

A linear layer adds its adapters' outputs to the product with its weight, which stays as loaded, packed or not. Other
parameters are small, so they are copied to separate memory and changed there. Only a value that replaces the loaded one (a
merge of models) overwrites it. To undo that, the loaded value is read from the checkpoint again.

Adapters come in groups, whose strengths may change at every call. Adapters of a group with strength 0 stay on the device.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import part_of, reading
from parallel_backend.core.spans import Shard
from parallel_backend.wire.loading import Adapt

from .linear import Adapter, PackedLinear, RankLinear
from .store.weight_store import WeightStore
from .tensor_parallel import TensorPlan


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the rank's parameters as in the key map, packed or not."""
    names = []
    for name, module in model.named_modules():
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if isinstance(module, PackedLinear):
            leaves = ["weight" if leaf == "packed" else leaf for leaf in leaves]
        names += [f"{name}.{leaf}" if name else leaf for leaf in leaves]
    return tuple(names)


@dataclass
class _LowRank:
    """A low-rank adapter of `layer`. `factors` include its scale."""

    layer: RankLinear
    factors: Adapter
    group: int
    weighed: tuple[float, torch.Tensor] | None = None  # the last strength other than 0 and 1, and `up` times it

    def put(self, strength: float) -> None:
        """Append the adapter to the layer's list, unless its strength is 0."""
        if strength == 0.0:
            return
        up, down = self.factors
        if strength != 1.0:
            if self.weighed is None or self.weighed[0] != strength:
                self.weighed = strength, up * strength
            up = self.weighed[1]
        self.layer.adapters.append((up, down))

    @property
    def nbytes(self) -> int:
        factors = [*self.factors, None if self.weighed is None else self.weighed[1]]
        return sum(factor.nbytes for factor in factors if factor is not None)


@dataclass
class _Values:
    """Differences to add to a parameter that is not a linear layer's weight."""

    parameter: nn.Parameter
    loaded: torch.Tensor
    added: dict[int, torch.Tensor] = field(default_factory=dict)  # group -> the sum of its differences, float32

    @property
    def nbytes(self) -> int:
        return self.parameter.nbytes + self.loaded.nbytes + sum(total.nbytes for total in self.added.values())


class Adapters:
    """The additions to the parameters of a rank's `model`. Factors are stored in the compute dtype `dtype`.

    To be created after the weights are in place and `plan` is applied. The plan's hooks then sum or gather the outputs of
    the weight's shard and of the adapters together.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        plan: TensorPlan,
        device: torch.device,
        dtype: torch.dtype,
        store: WeightStore,
    ):
        self._model, self._checkpoint, self._plan, self._store = model, checkpoint, plan, store
        self._device, self._dtype = device, dtype
        self._low_rank: list[_LowRank] = []
        self._values: dict[str, _Values] = {}
        self._replaced: set[str] = set()  # parameters whose loaded values are written over
        self._strengths: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all additions on the device, whatever their strengths."""
        return sum(each.nbytes for each in self._low_rank) + sum(each.nbytes for each in self._values.values())

    def add(self, part: Adapt) -> None:
        """Add to one of the rank's parameters, or replace its value. Raises AttributeError if the rank does not have it."""
        shard = self._shard(part.parameter)
        # up [out, r] @ down [r, in]: a shard of the rows cuts `up`, a shard of the columns cuts `down`.
        if part.down is None or shard is None or shard.dim == 0:
            part = replace(part, up=part_of(part.up, shard))
        else:
            part = replace(part, down=part_of(part.down, shard))
        if part.instead:
            self._replace(part)
            return
        self._put(part)

    @torch.no_grad()
    def weigh(self, strengths: tuple[float, ...]) -> None:
        """Set the strengths of the groups 1, 2, ... Group 0 always has strength 1."""
        self._strengths = strengths
        for low_rank in self._low_rank:
            low_rank.layer.adapters.clear()
        for low_rank in self._low_rank:
            low_rank.put(self._strength(low_rank.group))
        for values in self._values.values():
            if any(values.added):  # not for group 0 alone, whose strength stays
                self._sum_up(values)

    @torch.no_grad()
    def drop(self) -> None:
        """Remove all additions. Every parameter is then bitwise as loaded."""
        for low_rank in self._low_rank:
            low_rank.layer.adapters.clear()
        for name in self._values:
            self._store.rejoin(name)
        if self._replaced:
            self._load_again()
        self._low_rank, self._values, self._strengths = [], {}, ()

    def _strength(self, group: int) -> float:
        if group == 0:
            return 1.0
        return self._strengths[group - 1] if group <= len(self._strengths) else 0.0

    def _shard(self, parameter: str) -> Shard | None:
        """Return the rank's part of a parameter. None: the whole parameter."""
        return self._plan.shard(parameter, self._checkpoint.shape(parameter))

    @torch.no_grad()
    def _put(self, part: Adapt) -> None:
        name, _, leaf = part.parameter.rpartition(".")
        layer = self._model.get_submodule(name)
        up = part.up.to(self._device, torch.float32) * part.scale
        if isinstance(layer, RankLinear) and leaf == "weight":
            dtype = self._checkpoint.compute_dtype(part.parameter, self._dtype)
            down = None if part.down is None else part.down.to(self._device, dtype)
            self._low_rank.append(_LowRank(layer, (up.to(dtype), down), part.group))
            self._low_rank[-1].put(self._strength(part.group))
        else:
            shape = layer.get_parameter(leaf).shape
            delta = up if part.down is None else up @ part.down.to(self._device, torch.float32)
            self._add_to_values(part, delta.view(shape))

    def _add_to_values(self, part: Adapt, delta: torch.Tensor) -> None:
        values = self._values.get(part.parameter)
        if values is None:
            parameter = self._store.set_apart(part.parameter)
            values = self._values[part.parameter] = _Values(parameter, parameter.detach().clone())
        earlier = values.added.get(part.group)
        values.added[part.group] = delta if earlier is None else earlier.add_(delta)
        self._sum_up(values)

    def _sum_up(self, values: _Values) -> None:
        total = sum(self._strength(group) * added for group, added in values.added.items())
        values.parameter.copy_(values.loaded + total)

    @torch.no_grad()
    def _replace(self, part: Adapt) -> None:
        """Overwrite the loaded value. A packed weight gets an adapter with the difference instead."""
        name, _, leaf = part.parameter.rpartition(".")
        layer = self._model.get_submodule(name)
        if isinstance(layer, PackedLinear) and leaf == "weight":
            self._store.present(part.parameter)
            loaded = layer.weight.float()
            self._put(replace(part, up=part.up.to(self._device, torch.float32).view(loaded.shape) - loaded, scale=1.0))
            return
        self._store.overwrite(part.parameter, part.up)
        self._replaced.add(part.parameter)

    def _load_again(self) -> None:
        """Read the loaded values of replaced parameters from the checkpoint."""
        with reading(self._checkpoint) as reader:
            for name in self._replaced:
                dtype = self._model.get_parameter(name).dtype
                self._store.overwrite(name, reader.values(name, dtype, self._shard(name), self._device))
        self._replaced = set()
