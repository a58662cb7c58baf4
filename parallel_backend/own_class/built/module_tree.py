"""Describes a built module as data: names of classes, plain values and children. Ranks build the same module from it. No
constructor runs, so its arguments need not be known. Tensors are sent beside the data, by their names in the module."""

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from parallel_backend.core.own_class import ROOTS
from parallel_backend.own_class.built.building import CASTS, imported

TORCH = "torch.nn"
"""Module name for classes outside of ROOTS. They must be classes of torch.nn, and are looked up there by name."""
BASE = frozenset(vars(nn.Module()))
"""Attributes that every torch module has."""

Tree = dict[str, Any]
"""A module as JSON: class, values, children, names of parameters and of buffers."""


def described(module: nn.Module, without: Collection[str] = ()) -> Tree:
    """Return the module as data, without the children named in `without`. Attributes that are not plain data are left out.
    Raises ValueError if the module contains a class that ranks do not build."""
    kind = type(module)
    ours = kind.__module__.startswith(ROOTS)
    if not ours and not hasattr(nn, kind.__name__):
        raise ValueError(f"ranks do not build the class {kind.__qualname__} of {kind.__module__}")
    values: Tree = {}
    for name, value in vars(module).items():
        if name not in BASE:
            with contextlib.suppress(TypeError):
                values[name] = _data(value)
    children = {name: child for name, child in module._modules.items() if child is not None and name not in without}
    return {
        "class": [kind.__module__ if ours else TORCH, kind.__name__],
        "values": values,
        "children": {name: described(child) for name, child in children.items()},
        "parameters": list(module._parameters),
        "buffers": list(module._buffers),
    }


@dataclass(frozen=True)
class Importing:
    """How a rank imports classes: `folder` and `settings` as in OwnClass."""

    folder: str
    settings: tuple[tuple[str, str, bool], ...]


def built(
    tree: Tree, importing: Importing, tensors: Mapping[str, torch.Tensor], function: Callable[..., Any], at: str = ""
) -> nn.Module:
    """Return the module that `tree` describes (see `described`). Its tensors are those in `tensors` whose names begin with
    `at`. `function` replaces all functions among the values. Raises ValueError for a class outside of ROOTS and torch.nn."""
    place, name = tree["class"]
    if place != TORCH and not place.startswith(ROOTS):
        raise ValueError(f"ranks do not build the class of {place}")
    kind = getattr(nn, name) if place == TORCH else imported(importing.folder, place, name, importing.settings, ())
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    vars(module).update({name: _value(data, function) for name, data in tree["values"].items()})
    for name in tree["parameters"]:
        tensor = tensors.get(at + name)
        module.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
    for name in tree["buffers"]:
        module.register_buffer(name, tensors.get(at + name))
    if "weight" in module._parameters:
        vars(module).update(CASTS)
    for name, child in tree["children"].items():
        module.add_module(name, built(child, importing, tensors, function, f"{at}{name}."))
    return module.eval()


def set_constants(constants: Iterable[Sequence[Any]]) -> None:
    """Set module constants, each (module, name, value). Raises ValueError for a module outside of ROOTS."""
    for place, name, value in constants:
        if not place.startswith(ROOTS):
            raise ValueError(f"ranks set nothing in {place}")
        setattr(importlib.import_module(place), name, value)


def _data(value: Any) -> Any:
    """Return the value as JSON. Raises TypeError for a value that is not plain data."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case FunctionType():
            return {"function": value.__name__}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case dict():
            return {"dict": [[_data(key), _data(each)] for key, each in value.items()]}
        case tuple():
            return {"tuple": [_data(each) for each in value]}
        case list():
            return [_data(each) for each in value]
    raise TypeError(value)


def _value(data: Any, function: Callable) -> Any:
    match data:
        case {"function": _}:
            return function
        case {"dtype": name}:
            return getattr(torch, name)
        case {"range": ends}:
            return range(*ends)
        case {"dict": pairs}:
            return {_value(key, function): _value(each, function) for key, each in pairs}
        case {"tuple": values}:
            return tuple(_value(each, function) for each in values)
        case list():
            return [_value(each, function) for each in data]
    return data
