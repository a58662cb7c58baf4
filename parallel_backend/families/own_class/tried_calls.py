"""Calls of a class in a trial: the actual one made smaller, with random values; and random weights of the class."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .call_arguments import OPTIONS


@dataclass(frozen=True)
class Call:
    """Arguments of a model call: latent [B, C, (T,) H, W], timestep [B], and what the class gets by name."""

    x: torch.Tensor
    timestep: torch.Tensor
    named: Mapping[str, Any]
    """With entries of transformer_options that ranks get."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of ComfyUI's transformer_options that ranks do not get."""

    def run(self, model: Callable[..., Any], options: bool = True) -> Any:
        """The output. The model may write into copies alone. Without `options` it gets what ranks get."""
        named = copied(dict(self.named))
        if options:
            named[OPTIONS] = named.get(OPTIONS, {}) | copied(dict(self.options))
        return model(self.x.clone(), self.timestep.clone(), **({OPTIONS: {}} | named))


def numbers_of(call: Call) -> dict[str, int | float]:
    """The plain numbers among the arguments, by name."""
    return {name: value for name, value in call.named.items() if type(value) in (int, float)}


def replace_number(call: Call, name: str, number: float) -> Call:
    """The call with another number."""
    return dataclasses.replace(call, named={**call.named, name: number})


def words_of(call: Call) -> int:
    """Tokens of text. 0: it has none."""
    context = call.named.get("context")
    return context.shape[1] if isinstance(context, torch.Tensor) and context.ndim == 3 else 0


def copied(value: Any) -> Any:
    """New containers, and new tensors."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def smaller(call: Call, side: int, words: int) -> Call:
    """The call with at most `side` latent rows, columns and frames and `words` tokens of text, in all tensors that have
    them."""
    sizes = tuple(call.x.shape[2:])
    text = words_of(call)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim >= len(sizes) and tuple(tensor.shape[-len(sizes) :]) == sizes:
            for axis in range(-len(sizes), 0):
                tensor = tensor.narrow(axis, 0, min(side, tensor.shape[axis]))
        elif tensor.ndim > 1 and tensor.shape[1] == text:
            tensor = tensor[:, :words]
        return tensor

    return dataclasses.replace(call, x=cut(call.x), named=pytree.tree_map_only(torch.Tensor, cut, dict(call.named)))


def drawn(call: Call, seed: int, time: float | None = None) -> Call:
    """The call with random values in its floating tensors. `time`: for all entries; None: times between a tenth and nine
    tenths of the call's."""
    g = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.cpu().clone()
        return torch.randn(tensor.shape, generator=g)

    largest = max(float(call.timestep.float().abs().max()), 1e-3)
    times = (0.1 + 0.8 * torch.rand(call.timestep.shape, generator=g)) * largest
    if time is not None:
        times = torch.full_like(times, time)
    named, options = (pytree.tree_map_only(torch.Tensor, draw, dict(each)) for each in (call.named, call.options))
    return Call(draw(call.x), times.to(call.timestep.dtype), named, options)


def distance(a: Any, b: Any) -> float:
    """Largest difference of two outputs, as a share of the largest value of `b`. Infinite for NaN."""
    return float(((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).nan_to_num(math.inf))


def draw_weights(model: nn.Module, seed: int) -> None:
    """Weights on the CPU, in float32, with which values stay near 1. No gate is 0."""
    g = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
                module._parameters[name] = parameter
            std = 1 / math.sqrt(max(1, parameter[0].numel())) if parameter.ndim > 1 else 0.1
            parameter.normal_(0.0, std, generator=g)
            if parameter.ndim == 1 and f"{path}.{name}".endswith("weight"):
                parameter += 1
        for buffer in stored_tables(module).values():
            buffer.normal_(generator=g)


def stored_tables(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of floats that a file has."""
    found = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_floating_point()}
    return {name: buffer for name, buffer in found.items() if name not in module._non_persistent_buffers_set}
