"""Constructors of classes that extend a class of diffusers."""

import inspect
from collections.abc import Callable
from typing import Any

from diffusers.configuration_utils import register_to_config


def extends(base: Any) -> Callable[[Any], Any]:
    """register_to_config as a decorator of a constructor `init(self, *, further arguments, **arguments of base)`.

    register_to_config and checkpoints read the arguments from the signature, where `**` would hide those of `base`.
    """

    def decorate(init: Any) -> Any:
        further = (each for each in inspect.signature(init).parameters.values() if each.kind is each.KEYWORD_ONLY)
        init.__signature__ = inspect.Signature([*inspect.signature(base.__init__).parameters.values(), *further])
        return register_to_config(init)

    return decorate
