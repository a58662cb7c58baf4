"""Tensor parallelism as data: which linear layers are cut, along which side, and where a side is cut."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from parallel_backend.core.spans import Span, split


class Cut(Enum):
    COLUMN = "column"  # output features; the following layers take them as they are
    ROW = "row"  # input features; outputs are added up over the axis
    GATHER = "gather"  # output features, gathered again at once
    NORM = "norm"  # an RMSNorm over what a column-cut layer gives: it divides by the root mean square of all of it
    TABLE = "table"  # no layer: the last axis of the tensors that a module gives for the features of a column-cut layer


HEADS = "heads"


KEY_HEADS = "key heads"


WIDTH = "width"


@dataclass(frozen=True)
class Style:
    """`parts`: what the cut side of the weight is made of, in order; each part is cut on its own.

    HEADS: one attention projection, cut between heads. KEY_HEADS: one of keys or values where several heads share them
    (grouped-query attention); those heads stay together. WIDTH: anything else, cut evenly; several share what is left in
    equal parts.
    """

    cut: Cut
    parts: tuple[str, ...] = (WIDTH,)


COLUMN_BY_HEADS = Style(Cut.COLUMN, (HEADS,))


COLUMN_BY_KEY_HEADS = Style(Cut.COLUMN, (KEY_HEADS,))


ROW_BY_HEADS = Style(Cut.ROW, (HEADS,))


COLUMN = Style(Cut.COLUMN)


ROW = Style(Cut.ROW)


GATHER = Style(Cut.GATHER)


NORM_BY_HEADS = Style(Cut.NORM, (HEADS,))


TABLE_BY_HEADS = Style(Cut.TABLE, (HEADS,))


Plan = Mapping[str, Mapping[str, Style]]
"""Block list -> layer's name inside one of its blocks -> how it is cut. Another module of the model has the name ""."""


def cut_side(
    style: Style, size: int, heads: int, head_size: int, index: int, ranks: int, key_heads: int | None = None
) -> tuple[Span, ...]:
    """Rank `index`'s spans of a weight's cut side of `size` features."""
    key_heads = key_heads or heads
    own = split(Span(0, key_heads), ranks)[index]
    features = {HEADS: heads // key_heads * head_size, KEY_HEADS: head_size}  # for each key head
    widths = style.parts.count(WIDTH)
    rest = size - sum(key_heads * features[part] for part in style.parts if part != WIDTH)
    spans, start = [], 0
    for part in style.parts:
        if part != WIDTH:
            spans.append(Span(start + own.start * features[part], start + own.stop * features[part]))
            start += key_heads * features[part]
        else:
            spans.append(split(Span(start, start + rest // widths), ranks)[index])
            start += rest // widths
    assert start == size, "the plan's parts do not make up the weight"
    return tuple(spans)
