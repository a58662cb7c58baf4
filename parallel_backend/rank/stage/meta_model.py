"""A model without weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from parallel_backend.families import Family


def meta_model(family: Family, config: dict[str, Any]) -> nn.Module:
    """A model of the family's class, with parameters on the meta device.

    Buffers are real: constructors compute tables of positions and frequencies, which are in no file.
    """
    with _meta_parameters():
        arguments = {name: value for name, value in config.items() if name not in family.file.settings}
        model = family.transformer_class()(**arguments).eval().requires_grad_(False)
    model.register_to_config(**{name: config[name] for name in family.file.settings})
    family.fuse(model)
    return model


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Context in which parameters move to the meta device when registered, before the system has to provide their memory."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
