"""Names of a function's parameters, to be read once: to bind a signature costs a call as much as to launch ten kernels."""

import inspect
from collections.abc import Callable
from typing import Any


def method_parameters(method: Callable[..., Any]) -> list[str]:
    """Names of a method's parameters behind `self`, in the order of positional arguments; none behind `*args`."""
    names = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    return names
