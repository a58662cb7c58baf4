"""Tensor parallelism as data: which linear layers are cut, on which side, and at which features."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from parallel_backend.core.spans import Span, split, split_units


class CutKind(Enum):
    """Which side of a layer is cut, and how the ranks' outputs are combined."""

    COLUMN = "column"
    """Output features. The next layers take the rank's features without an exchange."""

    ROW = "row"
    """Input features. The ranks' outputs are summed (all-reduce)."""

    GATHER = "gather"
    """Output features, followed by an all-gather."""

    NORM = "norm"
    """An RMSNorm over the output of a COLUMN layer. Its mean square is taken over all ranks' features."""


HEADS = "heads"
"""Part of a cut side: an attention projection, cut between heads."""
WIDTH = "width"
"""Part of a cut side: other features, cut evenly. Several WIDTH parts have equal sizes."""


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut."""

    kind: CutKind

    parts: tuple[str, ...] = (WIDTH,)
    """Parts of the weight's cut side, in order: HEADS, WIDTH. Each rank gets a share of every part."""
    sizes: tuple[int, ...] = ()
    """Features of each part, if they are known. Empty: they follow from the heads."""
    units: tuple[int, ...] = ()
    """For each of `sizes`, the equal units that stay whole. Empty: each feature is one."""


COLUMN_BY_HEADS = LayerCut(CutKind.COLUMN, (HEADS,))
ROW_BY_HEADS = LayerCut(CutKind.ROW, (HEADS,))
COLUMN = LayerCut(CutKind.COLUMN)
ROW = LayerCut(CutKind.ROW)
GATHER = LayerCut(CutKind.GATHER)
NORM_BY_HEADS = LayerCut(CutKind.NORM, (HEADS,))

LARGE = 1 << 22
"""Elements of a linear layer's weight from which on a layer outside of the plan's lists is cut by GATHER.

Layers outside of the blocks make modulation and embed text. Whole on every rank they would be 5 % of Wan's weights on four
ranks, and 17 % of an nvfp4 file's. The gather of a smaller layer costs more than its memory is worth."""

LayerCuts = Mapping[str, Mapping[str, LayerCut]]
"""Block list -> layer of its blocks -> its cut. A module outside the blocks, and any by its full name, counts as a list with
the layer "". "*." at the beginning of a layer stands for the index of a block in a list inside the module."""


def cut_of(plan: LayerCuts, parameter: str) -> LayerCut | None:
    """Cut of the layer of `parameter` (`<list>.<index>.<layer>.weight`). None: the layer is not cut."""
    if (by_name := plan.get(parameter.rpartition(".")[0])) is not None:
        return by_name.get("")
    name, _, rest = parameter.partition(".")
    layers, layer = plan.get(name, {}), rest.partition(".")[2].rpartition(".")[0]
    return layers.get(layer) or layers.get(f"*.{layer.partition('.')[2]}")


def cut_outside(plan: LayerCuts, layer: str, shape: tuple[int, ...]) -> bool:
    """Whether the linear layer with a weight of `shape` is cut by GATHER: it is large and outside of the plan's lists."""
    rows, columns = shape
    return layer.partition(".")[0] not in plan and rows * columns >= LARGE


def cut_side(cut: LayerCut, size: int, heads: int, head_size: int, index: int, ranks: int) -> tuple[Span, ...]:
    """Spans of rank `index` on a weight's cut side of `size` features: one span for each part."""
    if cut.sizes:
        assert sum(cut.sizes) == size, "the plan's parts do not make up the weight"
        parts = zip(itertools.accumulate(cut.sizes), cut.sizes, cut.units or cut.sizes, strict=True)
        return tuple(split_units(Span(end - part, end), ranks, units)[index] for end, part, units in parts)
    rank_heads = split(Span(0, heads), ranks)[index]
    if cut.parts == (HEADS,):  # their size follows from the side: a second stream's may differ
        head_size = size // heads
    widths = cut.parts.count(WIDTH)
    rest = size - heads * head_size * cut.parts.count(HEADS)
    spans, start = [], 0
    for part in cut.parts:
        if part != WIDTH:
            spans.append(Span(start + rank_heads.start * head_size, start + rank_heads.stop * head_size))
            start += heads * head_size
        else:
            spans.append(split(Span(start, start + rest // widths), ranks)[index])
            start += rest // widths
    assert start == size, "the plan's parts do not make up the weight"
    return tuple(spans)
