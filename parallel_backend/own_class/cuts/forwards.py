"""Puts functions in the place of modules' forward."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def put_forward(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Have a module compute by `forward`. Returns the function that undoes it."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward

    def undo() -> None:
        vars(module)["forward"] = before
        if before is None:
            del vars(module)["forward"]

    return undo


def put_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> ExitStack:
    """As `put_forward`, for several modules until the stack is closed."""
    undo = ExitStack()
    for module, forward in forwards:
        undo.callback(put_forward(module, forward))
    return undo
