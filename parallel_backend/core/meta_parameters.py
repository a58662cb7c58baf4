"""Models whose parameters have no memory, while their tables of positions and frequencies have values."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Context in which parameters move to the meta device when registered, before the system has to provide their memory.

    It holds for modules that this thread makes. Another thread waits with one of its own, since each has to put back torch's
    function as it has found it.
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
