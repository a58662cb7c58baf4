"""Modules in another form: a class of methods is mixed in front of the class that a module has."""

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:  # what a form finds in the class is not known to the checker
    FormBase = Any
else:
    FormBase = nn.Module


class Form(FormBase):
    """Methods that take the place of those of a module's class. They reach the class's own by `super()`."""

    native: type[nn.Module]
    """The class."""


@functools.cache
def formed(form: type[Form], kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind` that has this form. It is in the module that `kind` is in, and has its name."""
    return type(kind.__name__, (form, kind), {"__module__": kind.__module__, "native": kind})


def put_form(form: Any, module: nn.Module) -> None:
    """Give a module this Form."""
    kind: Any = type(module)
    module.__class__ = formed(form, kind)
