"""Tensor parallelism from a plan that is data: which linear layers of a block are cut, along which side, and how.

As in Megatron-LM (arXiv 1909.08053): attention and feed-forward begin with column-cut layers (each rank some output
features) and end with row-cut ones (each rank some input features, the partial results added up over the axis). Layers
that make modulation vectors are cut by columns and their small output gathered, so that every large weight is cut.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from .collectives import all_reduce, start_gather
from .layout import Shard, Span, split
from .mesh import Axis
from .traffic import Traffic


class Cut(Enum):
    COLUMN = "column"  # output features; the following layers take them as they are
    ROW = "row"  # input features; outputs are added up over the axis
    GATHER = "gather"  # output features, gathered again at once


HEADS = "heads"
WIDTH = "width"


@dataclass(frozen=True)
class Style:
    """`parts`: what the cut side of the weight is made of, in order; each part is cut on its own.

    HEADS: one attention projection, cut between heads. WIDTH: anything else, cut evenly; several share what is left
    in equal parts.
    """

    cut: Cut
    parts: tuple[str, ...] = (WIDTH,)


COLUMN_BY_HEADS = Style(Cut.COLUMN, (HEADS,))
ROW_BY_HEADS = Style(Cut.ROW, (HEADS,))
COLUMN = Style(Cut.COLUMN)
ROW = Style(Cut.ROW)
GATHER = Style(Cut.GATHER)

Plan = Mapping[str, Mapping[str, Style]]
"""Block list -> linear layer's name inside one of its blocks -> how it is cut."""


def cut_side(style: Style, size: int, heads: int, head_size: int, index: int, ranks: int) -> tuple[Span, ...]:
    """Rank `index`'s spans of a weight's cut side of `size` features."""
    by_heads = heads * head_size
    widths = style.parts.count(WIDTH)
    rest = size - by_heads * (len(style.parts) - widths)
    spans, start = [], 0
    for part in style.parts:
        if part == HEADS:
            own = split(Span(0, heads), ranks)[index]
            spans.append(Span(start + own.start * head_size, start + own.stop * head_size))
            start += by_heads
        else:
            spans.append(split(Span(start, start + rest // widths), ranks)[index])
            start += rest // widths
    assert start == size, "the plan's parts do not make up the weight"
    return tuple(spans)


@dataclass(frozen=True)
class TensorPlan:
    """A family's plan, for one rank of the tensor axis and a model with these heads."""

    plan: Plan
    heads: int
    head_size: int
    axis: Axis

    def style(self, parameter: str) -> Style | None:
        """Of the layer that `parameter` (`<list>.<index>.<layer>.weight`) belongs to. None: every rank has it whole."""
        if self.axis.size == 1:
            return None
        name, _, rest = parameter.partition(".")
        return self.plan.get(name, {}).get(rest.partition(".")[2].rpartition(".")[0])

    def shards(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shard]:
        """This rank's part of each of these parameters that is cut; the others it has whole."""
        shards = {}
        for parameter, shape in shapes.items():
            style = self.style(parameter)
            if style is None:
                continue
            if parameter.endswith(".bias") and style.cut is Cut.ROW:
                if self.axis.index > 0:  # it is added once: by the first rank
                    shards[parameter] = Shard(0, ())
                continue
            dim = 1 if style.cut is Cut.ROW else 0
            spans = cut_side(style, shape[dim], self.heads, self.head_size, self.axis.index, self.axis.size)
            shards[parameter] = Shard(dim, spans)
        return shards

    def apply(self, model: nn.Module, traffic: Traffic) -> None:
        """Make the cut layers, whose weights are in place, work together over the axis. The model's code stays as it is."""
        if self.axis.size == 1:
            return
        local_heads = len(split(Span(0, self.heads), self.axis.size)[self.axis.index])
        for name, module in model.named_modules():
            if name.partition(".")[0] not in self.plan:
                continue
            if hasattr(module, "processor"):
                module.heads = local_heads
                module.inner_dim = local_heads * self.head_size
                if hasattr(module, "mlp_hidden_dim"):  # its layers are the feed-forward's too, divided by these two widths
                    module.mlp_hidden_dim = len(split(Span(0, module.mlp_hidden_dim), self.axis.size)[self.axis.index])
            style = self.style(f"{name}.weight")
            if style is None:
                continue
            if style.cut is Cut.ROW:
                module.register_forward_hook(lambda _module, _input, out: all_reduce(out, self.axis, traffic))
            elif style.cut is Cut.GATHER:
                sizes = [len(span) for span in split(Span(0, module.out_features), self.axis.size)]
                module.register_forward_hook(functools.partial(_gather, sizes, self.axis, traffic))
            module.out_features, module.in_features = module.weight_shape


def _gather(
    sizes: list[int], axis: Axis, traffic: Traffic, _module: nn.Module, _input: tuple, out: torch.Tensor
) -> torch.Tensor:
    """Forward hook: [..., sizes[own]] -> [..., sum(sizes)]."""
    return torch.cat(start_gather(out, sizes, out.ndim - 1, axis, traffic).wait(), dim=-1)
