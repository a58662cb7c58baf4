"""Changes the methods of a module that already exists: its class becomes a subclass with other methods."""

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:  # what a form finds in the class is not known to the checker
    FormBase = Any
else:
    FormBase = nn.Module


class Form(FormBase):
    """Methods that override those of a module's class. `super()` reaches the class's own."""

    native: type[nn.Module]
    """The class that the module had before."""


@functools.cache
def formed(form: type[Form], kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `kind` with this form's methods. It has the module and name of `kind`."""
    return type(kind.__name__, (form, kind), {"__module__": kind.__module__, "native": kind})


def put_form(form: Any, module: nn.Module) -> None:
    """Override methods of this module with those of the Form."""
    kind: Any = type(module)
    module.__class__ = formed(form, kind)
