"""Replaces the `forward` of modules with other functions."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def put_forward(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Replace a module's forward. Returns the function that restores it."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward

    def undo() -> None:
        vars(module)["forward"] = before
        if before is None:
            del vars(module)["forward"]

    return undo


def put_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> ExitStack:
    """Replace the forwards of several modules. Closing the returned stack restores them."""
    undo = ExitStack()
    for module, forward in forwards:
        undo.callback(put_forward(module, forward))
    return undo
