"""A layer that a hook has computed before the forward of its block calls it."""

import functools
from typing import Any

import torch
from torch import nn


class ComputedLayer(nn.Module):
    """Mixed into the class of a layer that is computed early."""

    computed: tuple[torch.Tensor, torch.Tensor] | None
    """Input and output for the forward's next call of the layer. None once they have been used."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.computed is None:
            return super().__call__(x)
        (computed_x, out), self.computed = self.computed, None
        assert computed_x is x, "the layer was computed of another input than its own"
        return out

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output for `x` early, and keep it until the block's forward calls the layer."""
        out = self(x)
        self.computed = x, out
        return out


@functools.cache
def _computed(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` with the same name, made once per class."""
    return type(kind.__name__, (ComputedLayer, kind), {})


def adopted(layer: Any) -> ComputedLayer:
    """`layer`, as a ComputedLayer from now on."""
    layer.__class__, layer.computed = _computed(type(layer)), None
    return layer
