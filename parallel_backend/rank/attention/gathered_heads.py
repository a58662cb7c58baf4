"""Ulysses by all-gather: a rank gets the hidden states of all tokens, and makes queries, keys and values of its own heads.

All-to-all sends three tensors, of which a rank has computed all heads for its own tokens. Here one tensor travels, that of
which they are made. A rank has the layers of its heads alone: as many products, and at two ranks two thirds of the bytes.
A head's queries, keys and values depend on its own rows of a layer only, so attention is exact. As in Megatron-LM's sequence
parallelism (arXiv 2205.05198), of which this is the part before attention; behind it each
rank gets all heads of its own tokens, as with all-to-all.

The class's forward stays as it is. A hook in front of an attention module gathers its inputs and calls the layers. Products
of a rank's own tokens run while those of the others arrive. When the forward calls a layer with its own tokens, it gets the
output for all tokens, and the rotary table that it is given is that of all tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_backend.core.signatures import method_parameters
from parallel_backend.families.base.blocks import BlockList, Projections, gathers
from parallel_backend.rank.comm.collectives import start_gather

from .computed_layer import ComputedLayer, adopted
from .context import AttentionContext, AttentionStep, GatheredTable

Lengths = list[int]
"""Tokens of a stream by Ulysses rank."""


class GatheredHeads:
    """A hook in front of one attention module, over JOINT."""

    def __init__(self, module: nn.Module, over: str, projections: Projections, context: AttentionContext, text_first: bool):
        self._over, self._names, self._context, self._text_first = over, projections, context, text_first
        self._image = [adopted(getattr(module, name)) for name in projections.image]
        self._has_text = projections.has_text(module)
        self._text = [adopted(getattr(module, name)) for name in projections.text if self._has_text]
        self._parameters = method_parameters(type(module).forward)
        module.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, _module: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        context, names = self._context, self._names
        assert context.step is not None, "attention outside of a micro-step"
        arguments = dict(zip(self._parameters, inputs, strict=False)) | named
        step = context.step.over(self._over)
        text, image = stream_lengths(step, context) if self._has_text else ([], joint_lengths(step, context))
        streams = [(self._image, arguments[names.image_argument], image)]
        if self._has_text:
            streams.append((self._text, arguments[names.text_argument], text))
        self._compute(step, streams)
        arguments[names.rotary_argument] = self._tables(arguments[names.rotary_argument], text, image)
        return tuple(arguments[name] for name in self._parameters[: len(inputs)]), {name: arguments[name] for name in named}

    def _compute(self, step: AttentionStep, streams: Sequence[tuple[list[ComputedLayer], torch.Tensor, Lengths]]) -> None:
        """Compute each stream's layers for the tokens of all ranks, in rank order."""
        axis, traffic = self._context.ulysses, self._context.traffic
        gathering = [start_gather(x_BsC, lengths, 1, axis, traffic) for _, x_BsC, lengths in streams]
        if not step.overlap:
            for each in gathering:
                each.wait_pending()
        own = [[layer(x_BsC) for layer in layers] for layers, x_BsC, _ in streams]
        for (layers, x_BsC, _), parts, outs in zip(streams, gathering, own, strict=True):
            received = parts.wait()
            for layer, out_BsE in zip(layers, outs, strict=True):
                by_rank = [out_BsE if rank == axis.index else layer(part) for rank, part in enumerate(received)]
                layer.computed = x_BsC, torch.cat(by_rank, dim=1)

    def _tables(self, table: Any, text: Lengths, image: Lengths) -> Any:
        """Rotary tables of all ranks' tokens, from this rank's. Each is gathered once a micro-step. See Projections."""
        step, axis = self._context.step, self._context.ulysses
        assert step is not None
        if isinstance(table, tuple):
            return tuple(self._tables(each, [], lengths) for each, lengths in zip(table, (image, text), strict=True))
        if id(table) not in step.tables:
            lengths = [sum(pair) for pair in zip(text, image, strict=True)] if text else image
            parts = start_gather(table, lengths, 1, axis, self._context.traffic).wait()
            step.tables[id(table)] = GatheredTable(table, parts)
        gathered, by_stream = step.tables[id(table)], bool(text)
        if by_stream not in gathered.joined:
            parts = gathered.parts
            if by_stream:  # as the outputs of the streams' layers lie behind each other
                first, second = (text, image) if self._text_first else (image, text)
                pairs = [part.split(list(pair), dim=1) for part, *pair in zip(parts, first, second, strict=True)]
                parts = [part for stream in zip(*pairs, strict=True) for part in stream]
            gathered.joined[by_stream] = torch.cat(parts, dim=1)
        return gathered.joined[by_stream]


def stream_lengths(step: AttentionStep, context: AttentionContext) -> tuple[Lengths, Lengths]:
    """Tokens of text and image by Ulysses rank."""
    ranks = context.ulysses_ranks(context.patch.index, context.ring.index)
    return [len(step.text[rank]) for rank in ranks], [len(step.image[rank]) for rank in ranks]


def joint_lengths(step: AttentionStep, context: AttentionContext) -> Lengths:
    """Tokens of text and image together by Ulysses rank."""
    return [step.lengths[rank] for rank in context.ulysses_ranks(context.patch.index, context.ring.index)]


def in_rank_order(
    tensors_BShD: Sequence[torch.Tensor], step: AttentionStep, context: AttentionContext
) -> tuple[torch.Tensor, ...]:
    """Joint tensors of all ranks' text and all ranks' image -> the tokens of one rank behind those of the other."""
    text, image = stream_lengths(step, context)
    if not sum(text):
        return tuple(tensors_BShD)
    lengths = [*text, *image] if step.text_first else [*image, *text]
    ordered = []
    for x_BShD in tensors_BShD:
        parts = x_BShD.split(lengths, dim=1)
        pairs = zip(parts[: len(text)], parts[len(text) :], strict=True)
        ordered.append(torch.cat([part for pair in pairs for part in pair], dim=1))
    return tuple(ordered)


def install_gathered_heads(
    modules: Sequence[tuple[nn.Module, str, BlockList, str]], context: AttentionContext, text_first: bool
) -> None:
    """Hook a stage's attention modules whose layers are cut over the Ulysses ranks (gathered_plan)."""
    for module, over, spec, _ in modules:
        if gathers(over, spec):
            assert spec.projections is not None
            GatheredHeads(module, over, spec.projections, context, text_first)
