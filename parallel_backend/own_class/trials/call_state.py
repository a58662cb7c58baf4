"""Tries whether calls of a class depend on each other, or on what ranks do not get."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.own_class.calls.call_arguments import OPTIONS, run_call
from parallel_backend.own_class.calls.tried_calls import Call, copied, distance, stored_tables
from parallel_backend.own_class.trials.comparison import difference, first_why_not
from parallel_backend.own_class.trials.stage_trial import WholeOutputs

MOST_DEPTH = 4
"""Maximum number of levels of containers in a module's attribute that are compared."""


def why_not_without_options(model: nn.Module, wholes: WholeOutputs) -> str:
    """Why the class needs entries of transformer_options that ranks do not get. Empty: it does not."""
    without = "without ComfyUI's transformer_options"

    def tried(call: Call, whole: torch.Tensor) -> str:
        return difference(f"it gives a different result {without}", call.run(model, options=False), whole)

    return first_why_not((functools.partial(tried, *each) for each in wholes), f"it does not run {without}")


def how_calls_depend(model: nn.Module, fresh: nn.Module, calls: Sequence[Call]) -> str:
    """How calls of the class depend on each other. Empty: they do not. The model's weights are changed. `fresh`: another
    model of the class, without weights."""
    outputs = []
    rewritten: set[str] = set()
    for call in (*calls, calls[0]):
        given = dataclasses.replace(call, x=call.x.clone(), named=copied(call.named), options=copied(call.options))
        before, arguments = module_state(model), _written(given)
        both = {OPTIONS: given.named.get(OPTIONS, {}) | dict(given.options)}
        outputs.append(run_call(model, given.x, call.timestep.clone(), dict(given.named) | both))
        if changed := [name for name, value in module_state(model).items() if before.get(name) != value]:
            return f"it keeps {changed[0]} from call to call"
        after = _written(given)
        changed = [name for name, value in arguments.items() if after.get(name) != value]
        rewritten |= {name for name in changed if isinstance(call.named.get(name), torch.Tensor)}
        if others := [name for name in changed if name not in rewritten]:
            return f"it writes into its argument {others[0]}, but a rank has only a copy"
    if distance(outputs[-1], outputs[0]) > 0:
        return "the same call gives a different result the second time"
    if rewritten and not _stay_alike(model, calls):
        return f"it writes into its argument {min(rewritten)}, but a rank has only a copy"
    for parameter in model.parameters():
        parameter.mul_(0.7)
    for name, module in fresh.named_modules():  # the same memory
        module._parameters.update(model.get_submodule(name)._parameters)
        module._buffers.update(stored_tables(model.get_submodule(name)))
    if distance(calls[1].run(model), calls[1].run(fresh)) > 0:
        return "it keeps results of earlier calls, which another LoRA would make wrong"
    return ""


def _stay_alike(model: nn.Module, calls: Sequence[Call]) -> bool:
    """Whether outputs stay the same although calls have written into tensors among their arguments. They do if a class
    writes the same padding in each call."""
    given = [copied(call.named) for call in calls]
    for call in (*calls, *reversed(calls)):
        for first, written in zip(calls, given, strict=True):
            options = {OPTIONS: written.get(OPTIONS, {}) | copied(dict(first.options))}
            out = run_call(model, call.x.clone(), call.timestep.clone(), written | options)
            if distance(out, dataclasses.replace(first, x=call.x, timestep=call.timestep).run(model)) > 0:
                return False
    return True


def module_state(model: nn.Module) -> dict[str, Any]:
    """Values of the modules' attributes, to compare before and after a call. Tensors are left out: their effect on later
    calls is tried. A number may count calls, and have an effect only after many."""

    def seen(value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return None
        if isinstance(value, dict) and depth < MOST_DEPTH:
            return tuple((key, seen(each, depth + 1)) for key, each in value.items())
        if isinstance(value, list | tuple) and depth < MOST_DEPTH:
            return tuple(seen(each, depth + 1) for each in value)
        return value if isinstance(value, int | float | str) else None

    return {
        f"{name}.{key}".strip("."): seen(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_modules") and "_hooks" not in key
    }


def _written(call: Call) -> dict[str, Any]:
    """Values and versions of a call's arguments, to compare before and after it. A class may add numbers and strings to the
    options."""
    options = {key: value for key, value in call.options.items() if not isinstance(value, int | float | str | None)}
    found = {}
    for name, value in ({"x": call.x} | dict(call.named) | options).items():
        leaves, structure = pytree.tree_flatten(value)
        plain = (torch.Tensor, int, float, str)
        held = [leaf._version if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves if isinstance(leaf, plain)]
        found[name] = held, str(structure)
    return found
