"""Imports the class of an OwnClass, and builds its model from torch's own layers."""

import functools
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parallel_backend.core.fused_linear import FusedLinear
from parallel_backend.core.own_class import DTYPE, OwnClass
from parallel_backend.own_class.adapters.adapters import adapt
from parallel_backend.own_class.cuts.fused_blocks import fuse

CASTS = {"comfy_cast_weights": False, "weight_function": (), "bias_function": ()}
"""Attributes that ComfyUI's functions read from a layer before they use its weight. These values say that no patch changes
it."""


class Embedding(nn.Embedding):
    """torch's embedding that also takes `out_dtype`, as ComfyUI's does."""

    def forward(self, input: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Token numbers [...] -> [..., width]."""
        out = super().forward(input)
        return out if out_dtype is None else out.to(out_dtype)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with a bias that is None, as ComfyUI's has."""

    bias = None


class TorchLayers:
    """Replaces ComfyUI's `operations` with torch's layers, because ranks do not need ComfyUI's casts of weights."""

    Linear, Embedding, RMSNorm = FusedLinear, Embedding, RMSNorm
    Conv1d, Conv2d, Conv3d = nn.Conv1d, nn.Conv2d, nn.Conv3d
    ConvTranspose1d, ConvTranspose2d = nn.ConvTranspose1d, nn.ConvTranspose2d
    LayerNorm, GroupNorm = nn.LayerNorm, nn.GroupNorm

    @staticmethod
    def conv_nd(dims: int, *args: Any, **kwargs: Any) -> nn.Module:
        """Return a convolution over two or three axes."""
        return {2: nn.Conv2d, 3: nn.Conv3d}[dims](*args, **kwargs)


@functools.cache
def imported(
    folder: str, module: str, name: str, settings: tuple[tuple[str, str, bool], ...], imports: tuple[str, ...]
) -> type[nn.Module]:
    """Return the class. ComfyUI's own process has imported everything already, so there `settings` change nothing. Raises
    ValueError if the module has no model of this name. `imports`: modules to import first, which the class's code uses
    without importing."""
    if folder and module.partition(".")[0] not in sys.modules:
        sys.path.append(folder)  # last: it has modules with names as common as `utils`
        for place, attribute, value in settings:
            *path, last = attribute.split(".")
            holder = functools.reduce(getattr, path, importlib.import_module(place))
            setattr(holder, last, value)
    for each in imports:
        importlib.import_module(each)
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"{module} has no model class {name}")
    return kind


def class_of(own: OwnClass) -> type[nn.Module]:
    """Return the class, see `imported`."""
    return imported(own.folder, own.module, own.name, own.settings, own.imports)


def arguments_of(own: OwnClass) -> dict[str, Any]:
    """Return the class's arguments beside operations, dtype and device."""
    return {
        name: getattr(torch, value.removeprefix(DTYPE)) if isinstance(value, str) and value.startswith(DTYPE) else value
        for name, value in json.loads(own.arguments).items()
    }


def build(own: OwnClass, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of the class with compute dtype `dtype`. Parameters are on the meta device; tables that it computes
    have values."""
    with meta_parameters():
        model = class_of(own)(**arguments_of(own), operations=TorchLayers, dtype=dtype, device=None)
    fuse(model)
    adapt(own.kind, model)
    for module in model.modules():
        if hasattr(module, "weight"):
            vars(module).update(CASTS)
    return model.eval().requires_grad_(False)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Context in which new parameters move to the meta device at once, so that they take no memory. Buffers keep their
    values.

    It acts on modules that this thread creates. Another thread's context waits, because each one replaces and restores
    torch's `register_parameter`.
    """
    with _one_at_a_time():
        register, thread = nn.Module.register_parameter, threading.get_ident()

        def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(module, name, parameter)
            if parameter is not None and threading.get_ident() == thread:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


@functools.cache
def _one_at_a_time() -> threading.RLock:
    return threading.RLock()
