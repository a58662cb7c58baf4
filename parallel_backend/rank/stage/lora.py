"""LoRA and other additions to a rank's weights, made without reading the weights again.

A linear layer computes its adapters beside its weight, which stays as loaded, packed or not. Other parameters are small:
the rank keeps their loaded values and adds to the parameter itself.
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
    """Names of the rank's parameters by the key map, packed or not."""
    names = []
    for name, module in model.named_modules():
        packed = isinstance(module, PackedLinear)
        own = [leaf for leaf, _ in module.named_parameters(recurse=False) if not (packed and leaf == "packed")]
        names += [f"{name}.{leaf}" if name else leaf for leaf in own + ["weight"] * packed]
    return tuple(names)


class Adapters:
    """What is added to the parameters of a rank's `model` now. Factors are kept in the compute dtype `dtype`.

    Made after the weights are in place and `plan` is applied. A row-cut layer then adds up, and a column-cut layer gathers,
    the sum of its shard's and the adapter's outputs.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, plan: TensorPlan, device: torch.device, dtype: torch.dtype):
        self._model, self._checkpoint, self._plan = model, checkpoint, plan
        self._device, self._dtype = device, dtype
        self._factors: list[Adapt] = []  # the rank's shards before scaling, for `rescale`
        self._layers: list[RankLinear] = []
        self._values: dict[
            str, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # parameter -> (loaded value, float32 sum of what is added)
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
        """Replace the scales of all that was added, in the order of `add`. All of it must have had factors."""
        factors = [replace(part, scale=scale) for part, scale in zip(self._factors, scales, strict=True)]
        self.drop()
        self._factors = factors
        for part in factors:
            self._put(part)

    @torch.no_grad()
    def drop(self) -> None:
        """Remove all that was added. Every parameter is as loaded, bit for bit."""
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
            dtype = self._checkpoint.compute_dtype(part.parameter, self._dtype)
            down = None if part.down is None else part.down.to(self._device, dtype)
            layer.adapters.append((up.to(dtype), down))
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
    """The rank's shard of a full difference [out, in] or of a factor."""
    if shard is None:
        return values
    return torch.cat([values.narrow(shard.dim, span.start, len(span)) for span in shard.spans], shard.dim)
