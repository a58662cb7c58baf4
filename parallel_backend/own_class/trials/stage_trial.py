"""Tries whether stages of one block each, and single batch entries, give the same as the uncut model. Also whether a class's
calls depend on each other, or on options that ranks do not get."""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parallel_backend.core.own_class import OwnBlock
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.call_arguments import OPTIONS, run_call
from parallel_backend.own_class.calls.tried_calls import Call, copied, distance, entry_of, stored_tables
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.stages import StageBlocks, Wanted
from parallel_backend.own_class.trials.comparison import as_unproven, check_equal

WholeOutputs = Sequence[tuple[Call, Any]]
"""Calls, each with the uncut model's output."""


def noted_run(model: nn.Module, call: Call) -> tuple[Call, Any] | None:
    """Return (the call, the model's output). None: the class raises an exception of any kind."""
    try:
        return call, call.run(model)
    except Exception:
        return None


class Mailbox:
    """The link between stages that run one after the other in one process."""

    def __init__(self) -> None:
        self._sent: list[tuple[torch.Tensor, int]] = []

    def send(self, tensor: torch.Tensor) -> None:
        self._sent.append((tensor, tensor._version))

    def receive(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [self._next(*each) for each in wanted]

    def _next(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if not self._sent:
            raise Unproven("a stage waits for a value that is not sent")
        tensor, version = self._sent.pop(0)
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise Unproven(f"a stage sends {list(tensor.shape)}, but {list(shape)} is expected")
        if tensor._version != version:
            raise Unproven("a value is written to after it was sent")
        return tensor.clone()


def check_staged(model: nn.Module, blocks: Sequence[OwnBlock], wholes: WholeOutputs) -> None:
    """Raise Unproven if stages of one block each give other outputs than the uncut model."""
    for call, whole in wholes:
        mailbox = Mailbox()
        out: Any = None
        with as_unproven("a stage does not run"):
            for number in range(len(blocks)):
                with closing(StageBlocks(model, blocks, Span(number, number + 1), mailbox)) as stage:
                    out = call.run(stage.call, options=False)
            if out is None:
                raise Unproven("stages return nothing")
            check_equal("stages give a different result", out, whole)


def check_by_entry(model: nn.Module, wholes: WholeOutputs) -> None:
    """Raise Unproven if single batch entries give other outputs than the whole batch."""
    for call, whole in wholes:
        for entry in range(len(call.x)):
            with as_unproven("a single entry of a batch does not run"):
                out = entry_of(call, entry).run(model, options=False)
                check_equal("a single entry of a batch gives a different result", out, whole[entry : entry + 1])


MOST_DEPTH = 4
"""Maximum depth of containers in a module's attribute that are compared."""


def check_without_options(model: nn.Module, wholes: WholeOutputs) -> None:
    """Raise Unproven if the class needs entries of transformer_options that ranks do not get."""
    without = "without ComfyUI's transformer_options"
    for call, whole in wholes:
        with as_unproven(f"it does not run {without}"):
            check_equal(f"it gives a different result {without}", call.run(model, options=False), whole)


def check_calls_apart(model: nn.Module, fresh: nn.Module, calls: Sequence[Call]) -> None:
    """Raise Unproven if calls of the class depend on each other. Changes the model's weights. `fresh`: another model of the
    class, without weights."""
    outputs = []
    rewritten: set[str] = set()
    for call in (*calls, calls[0]):
        given = dataclasses.replace(call, x=call.x.clone(), named=copied(call.named), options=copied(call.options))
        before, arguments = module_state(model), _written(given)
        both = {OPTIONS: given.named.get(OPTIONS, {}) | dict(given.options)}
        outputs.append(run_call(model, given.x, call.timestep.clone(), dict(given.named) | both))
        if changed := [name for name, value in module_state(model).items() if before.get(name) != value]:
            raise Unproven(f"it keeps {changed[0]} from call to call")
        after = _written(given)
        changed = [name for name, value in arguments.items() if after.get(name) != value]
        rewritten |= {name for name in changed if isinstance(call.named.get(name), torch.Tensor)}
        if others := [name for name in changed if name not in rewritten]:
            raise Unproven(f"it writes into its argument {others[0]}, but a rank has only a copy")
    if distance(outputs[-1], outputs[0]) > 0:
        raise Unproven("the same call gives a different result the second time")
    if rewritten and not _stay_alike(model, calls):
        raise Unproven(f"it writes into its argument {min(rewritten)}, but a rank has only a copy")
    for memory in {each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.parameters()}.values():
        torch.empty(0).set_(memory).mul_(0.7)  # of several weights
    for name, module in fresh.named_modules():  # the same memory
        module._parameters.update(model.get_submodule(name)._parameters)
        module._buffers.update(stored_tables(model.get_submodule(name)))
    if distance(calls[1].run(model), calls[1].run(fresh)) > 0:
        raise Unproven("it keeps results of earlier calls, which another LoRA would make wrong")


def _stay_alike(model: nn.Module, calls: Sequence[Call]) -> bool:
    """Whether outputs stay the same although calls have written into their tensor arguments. They do, for example, if the
    class writes the same padding in each call."""
    given = [copied(call.named) for call in calls]
    for call in (*calls, *reversed(calls)):
        for first, written in zip(calls, given, strict=True):
            options = {OPTIONS: written.get(OPTIONS, {}) | copied(dict(first.options))}
            out = run_call(model, call.x.clone(), call.timestep.clone(), written | options)
            if distance(out, dataclasses.replace(first, x=call.x, timestep=call.timestep).run(model)) > 0:
                return False
    return True


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return the values of the modules' attributes, to be compared before and after a call. Tensors are left out, because
    later calls show their effect. Numbers are included: one that counts calls may only matter after many."""

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
    """Return the values and versions of a call's arguments, to be compared before and after it. Numbers and strings in the
    options are left out, because a class may add some."""
    options = {key: value for key, value in call.options.items() if not isinstance(value, int | float | str | None)}
    found = {}
    for name, value in ({"x": call.x} | dict(call.named) | options).items():
        leaves, structure = pytree.tree_flatten(value)
        plain = (torch.Tensor, int, float, str)
        held = [leaf._version if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves if isinstance(leaf, plain)]
        found[name] = held, str(structure)
    return found
