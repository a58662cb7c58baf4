"""What a rank adds to its weights without reading them again: LoRA and its kin.

A linear layer computes what is added beside its weight, which stays as it was loaded, packed or not. Of all other
parameters, which are small, a rank keeps the values that it loaded, and adds to the parameter itself.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.spans import Shard
from parallel_backend.wire.loading import Adapt

from .linear import PackedLinear, RankLinear
from .tensor_parallel import TensorPlan


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a rank has, as the key map calls them, however they are kept."""
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
        self._factors: list[Adapt] = []  # the rank's shard of each, as it came: what another scale is applied to
        self._layers: list[RankLinear] = []
        self._values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # parameter -> (as loaded, what is added in float32)
        self.nbytes = 0

    def add(self, part: Adapt) -> None:
        """Add to one of the rank's parameters. AttributeError if it has no such parameter."""
        shape = self._checkpoint.shape(part.parameter)
        shard = self._plan.shards({part.parameter: shape}).get(part.parameter)
        if part.down is None or shard is None or shard.dim == 0:
            part = replace(part, up=_own_part(part.up, shard))
        else:
            part = replace(part, down=_own_part(part.down, shard))
        if part.down is not None:
            self._factors.append(part)
        self._put(part)

    def rescale(self, scales: Sequence[float]) -> None:
        """Other scales for all that was added, in its order; it must be factors throughout."""
        factors = [replace(part, scale=scale) for part, scale in zip(self._factors, scales, strict=True)]
        self.drop()
        self._factors = factors
        for part in factors:
            self._put(part)

    @torch.no_grad()
    def drop(self) -> None:
        """Every parameter is as it was loaded, bit for bit."""
        for layer in self._layers:
            layer.adapters.clear()
        for parameter, (loaded, _) in self._values.items():
            self._model.get_parameter(parameter).copy_(loaded)
        self._factors, self._layers, self._values, self.nbytes = [], [], {}, 0

    @torch.no_grad()
    def _put(self, part: Adapt) -> None:
        name, _, leaf = part.parameter.rpartition(".")
        layer = self._model.get_submodule(name)
        up = part.up.to(self._device, torch.float32) * part.scale
        called = name.rpartition(".")[0] not in self._checkpoint.family.forward.weight_readers
        if isinstance(layer, RankLinear) and leaf == "weight" and called:
            down = None if part.down is None else part.down.to(self._device, self._dtype)
            layer.adapters.append((up.to(self._dtype), down))
            self._layers.append(layer)
            self.nbytes += sum(factor.nbytes for factor in layer.adapters[-1] if factor is not None)
        else:
            parameter = layer.get_parameter(leaf)
            delta = up if part.down is None else up @ part.down.to(self._device, torch.float32)
            self._add_to_values(part.parameter, parameter, delta.view(parameter.shape))

    def _add_to_values(self, name: str, parameter: nn.Parameter, delta: torch.Tensor) -> None:
        if name in self._values:
            loaded, added = self._values[name]
        else:
            loaded, added = parameter.detach().clone(), torch.zeros_like(delta)
            self.nbytes += loaded.nbytes + added.nbytes
        added += delta
        self._values[name] = loaded, added
        parameter.copy_(loaded + added)


def _own_part(values: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """The rank's part; of a factor too, whose uncut side is its rank."""
    if shard is None:
        return values
    return torch.cat([values.narrow(shard.dim, span.start, len(span)) for span in shard.spans], shard.dim)
