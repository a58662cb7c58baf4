"""A model without weights."""

from typing import Any

from torch import nn

from parallel_backend.core.meta_parameters import meta_parameters
from parallel_backend.families import Family


def meta_model(family: Family, config: dict[str, Any]) -> nn.Module:
    """A model of the family's class, with parameters on the meta device.

    Buffers are real: constructors compute tables of positions and frequencies, which are in no file.
    """
    with meta_parameters():
        return family.transformer_class()(**config).eval().requires_grad_(False)
