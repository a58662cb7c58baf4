"""Values first: under Ulysses a layer's values are computed before its queries and keys, and travel meanwhile.

The class's own forward runs. A hook computes the values where their input is first seen, and the layer, when the forward
calls it, gives out what is there. As in cache-dit's asynchronous Ulysses and in CoCoDiff (arXiv 2604.14561). The values are
the same numbers: attention is exact.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_backend.core.spans import Span, split
from parallel_backend.families.base.blocks import IMAGE, JOINT, Values
from parallel_backend.rank.comm.staging import staged

from .context import AttentionContext
from .ulysses import start_sequence_to_heads


class ComputedLayer:
    """Mixed into the class of a layer that makes values."""

    computed: tuple[torch.Tensor, torch.Tensor] | None
    """Input and output of a call that is still to come."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.computed is None:
            return super().__call__(x)
        (given, out), self.computed = self.computed, None
        assert given is x, "values were computed of another input than the layer's"
        return out

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The output for `x`, kept for the call."""
        out = self(x)
        self.computed = x, out
        return out


@functools.cache
def _computed(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `kind` with its name. Made once per class."""
    return type(kind.__name__, (ComputedLayer, kind), {})


class ValuesFirst:
    """Hooks around one attention module."""

    def __init__(
        self, module: nn.Module, over: str, values: Values, context: AttentionContext, head_size: int, text_first: bool
    ):
        """`over`: JOINT or IMAGE."""
        self._over, self._context, self._head_size, self._text_first = over, context, head_size, text_first
        self._layers, self._arguments = [_adopted(getattr(module, values.image))], [values.image_argument]
        if getattr(module, values.text, None) is None:
            getattr(module, values.query).register_forward_pre_hook(lambda _layer, inputs: self._begin(inputs))
            return
        self._layers.append(_adopted(getattr(module, values.text)))
        self._arguments.append(values.text_argument)
        if text_first:  # as tokens are in attention
            self._layers.reverse()
            self._arguments.reverse()
        self._signature = inspect.signature(type(module).forward)
        module.register_forward_pre_hook(self._begin_with_arguments, with_kwargs=True)

    def _begin_with_arguments(self, module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        given = self._signature.bind(module, *inputs, **named).arguments
        self._begin([given[name] for name in self._arguments])

    def _begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Compute the values of `inputs`, [B, n, channels] of each stream in order, and start their transfer.

        Whether it does is the same on all ranks.
        """
        context = self._context
        step = None if context.step is None else context.step.over(self._over)
        if step is None or not step.overlap or not step.runs or staged(inputs[0], context.ulysses.group):
            return
        assert context.early_values is None, "values of another layer were never attended to"
        parts = [layer.compute(x) for layer, x in zip(self._layers, inputs, strict=True)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        v_BsHD = joined.unflatten(-1, (-1, self._head_size))
        if context.sharing > 1:
            v_BsHD = v_BsHD.repeat_interleave(context.sharing, dim=2)
        axis, ranks = context.ulysses, context.ulysses_ranks(context.patch.index, context.ring.index)
        tokens = [step.lengths[rank] for rank in ranks]
        surplus = v_BsHD.shape[1] - tokens[axis.index]  # see ParallelAttention.attend
        v_BsHD = v_BsHD[:, surplus:] if self._text_first else v_BsHD[:, : tokens[axis.index]]
        heads = split(Span(0, v_BsHD.shape[2]), axis.size)
        ready = start_sequence_to_heads([v_BsHD], [tokens], heads, axis, context.traffic, context.codec)

        def finish() -> torch.Tensor:
            assert all(layer.computed is None for layer in self._layers), (
                "the layer has not asked for values computed for it"
            )
            return ready()[0]

        context.early_values = finish


def _adopted(layer: nn.Module) -> nn.Module:
    layer.__class__, layer.computed = _computed(type(layer)), None
    return layer


def install_early_values(
    modules: Sequence[tuple[nn.Module, str, Values | None]], context: AttentionContext, head_size: int, text_first: bool
) -> None:
    """Hook a stage's attention modules where values travel between Ulysses ranks, and other transfers do not.

    Tensor ranks add up inside some layers' norms, between the values' start and attention: an order of two groups' transfers
    that NCCL may not forgive. Gloo's copies of a GPU's tensors have the host wait for the device, which is better done once.
    """
    axis = context.ulysses
    if axis.size == 1 or context.tensor.size > 1:
        return
    for module, over, values in modules:
        if values is not None and over in (JOINT, IMAGE):
            ValuesFirst(module, over, values, context, head_size, text_first)
