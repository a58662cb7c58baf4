"""Values first: under Ulysses a layer's values travel while the layer's queries and keys are computed.

A hook computes the values as soon as their input is known, and starts their transfer. The class's forward stays as it is:
when it calls the values' layer, the layer returns the output that the hook has computed. Values are the same numbers, so
attention is exact. As in cache-dit's asynchronous Ulysses and in CoCoDiff (arXiv 2604.14561).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_backend.core.signatures import method_parameters
from parallel_backend.core.spans import Span, split
from parallel_backend.families.base.blocks import CAUSAL_TEXT, JOINT, QUERIES, TEXT_VALUES, VALUES, BlockList
from parallel_backend.rank.comm.staging import staged

from .computed_layer import adopted
from .context import AttentionContext
from .ulysses import start_sequence_to_heads


class ValuesFirst:
    """Hooks around one attention module."""

    def __init__(self, module: nn.Module, over: str, context: AttentionContext, head_size: int, text_first: bool):
        """`over`: JOINT, or CAUSAL_TEXT, where the text does not run."""
        self._over, self._context, self._head_size, self._text_first = over, context, head_size, text_first
        self._layers, self._arguments = [adopted(getattr(module, VALUES))], ["hidden_states"]
        if getattr(module, TEXT_VALUES, None) is None:
            getattr(module, QUERIES).register_forward_pre_hook(lambda _layer, inputs: self._begin(inputs))
            return
        self._layers.append(adopted(getattr(module, TEXT_VALUES)))
        self._arguments.append("encoder_hidden_states")
        if text_first:  # the order of tokens in attention
            self._layers.reverse()
            self._arguments.reverse()
        self._parameters = method_parameters(type(module).forward)
        module.register_forward_pre_hook(self._begin_with_arguments, with_kwargs=True)

    def _begin_with_arguments(self, _module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        arguments = dict(zip(self._parameters, inputs, strict=False)) | named
        self._begin([arguments[name] for name in self._arguments])

    def _begin(self, inputs_BsC: Sequence[torch.Tensor]) -> None:
        """Compute the values of `inputs_BsC`, one for each stream in order, and start their transfer.

        All ranks decide alike whether to, as a transfer needs.
        """
        context = self._context
        step = None if context.step is None else context.step.over(self._over)
        if self._over == CAUSAL_TEXT and context.step is not None and any(map(len, context.step.text)):
            return
        if step is None or not step.overlap or not step.runs or staged(inputs_BsC[0], context.ulysses.group):
            return
        assert context.early_values is None, "values of another layer were never attended to"
        parts = [layer.compute(x) for layer, x in zip(self._layers, inputs_BsC, strict=True)]
        joined_BsC = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        v_BsHD = joined_BsC.unflatten(-1, (-1, self._head_size))
        axis, ranks = context.ulysses, context.ulysses_ranks(context.patch.index, context.ring.index)
        tokens = [step.lengths[rank] for rank in ranks]
        surplus = v_BsHD.shape[1] - tokens[axis.index]  # the token in place of no text, as in ParallelAttention._attend
        v_BsHD = v_BsHD[:, surplus:] if self._text_first else v_BsHD[:, : tokens[axis.index]]
        heads = split(Span(0, v_BsHD.shape[2]), axis.size)
        ready = start_sequence_to_heads([v_BsHD], [tokens], heads, axis, context.traffic, context.codec)

        def finish() -> torch.Tensor:
            assert all(layer.computed is None for layer in self._layers), (
                "the layer has not asked for values computed for it"
            )
            return ready()[0]

        context.early_values = finish


def install_early_values(
    modules: Sequence[tuple[nn.Module, str, BlockList, str]], context: AttentionContext, head_size: int, text_first: bool
) -> None:
    """Hook a stage's attention modules where values travel between Ulysses ranks, and no other transfer can come between.

    Transfers that go through host memory are not started early (staged): each makes the host wait for the device, so one
    for queries, keys and values together is better.
    """
    # Tensor ranks sum inside some layers' norms, between the values' start and attention. NCCL may deadlock when transfers
    # of two groups are under way and the ranks' devices begin them in different orders.
    if context.ulysses.size == 1 or context.tensor.size > 1:
        return
    for module, over, spec, _ in modules:
        if spec.values_first and over in (JOINT, CAUSAL_TEXT):
            ValuesFirst(module, over, context, head_size, text_first)
