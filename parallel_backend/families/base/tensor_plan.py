"""Tensor parallelism as data: which linear layers are cut, along which side, and where a side is cut."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from parallel_backend.core.spans import Span, split


class CutKind(Enum):
    """Which side of a layer is cut, and how the ranks' results come together."""

    COLUMN = "column"
    """Output features. The layers that follow take a rank's own as they are."""

    ROW = "row"
    """Input features. The ranks' outputs are added up."""

    GATHER = "gather"
    """Output features, gathered again at once."""

    NORM = "norm"
    """An RMSNorm over the output of a column-cut layer: the root mean square is that of all ranks' features."""

    TABLE = "table"
    """No layer: the last axis of the tensors that a module gives for the features of a column-cut layer."""


HEADS = "heads"
"""Part of a cut side: one attention projection, cut between heads."""
KEY_HEADS = "key heads"
"""Part of a cut side: a projection to keys or values that several heads share (grouped-query attention). The heads that
share one stay on one rank."""
WIDTH = "width"
"""Part of a cut side: anything else, cut evenly. Several of them have equal shares of what heads leave."""


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut."""

    kind: CutKind

    parts: tuple[str, ...] = (WIDTH,)
    """What the cut side of the weight is made of, in order: HEADS, KEY_HEADS, WIDTH. Each part is cut on its own."""


COLUMN_BY_HEADS = LayerCut(CutKind.COLUMN, (HEADS,))
COLUMN_BY_KEY_HEADS = LayerCut(CutKind.COLUMN, (KEY_HEADS,))
ROW_BY_HEADS = LayerCut(CutKind.ROW, (HEADS,))
COLUMN = LayerCut(CutKind.COLUMN)
ROW = LayerCut(CutKind.ROW)
GATHER = LayerCut(CutKind.GATHER)
NORM_BY_HEADS = LayerCut(CutKind.NORM, (HEADS,))
TABLE_BY_HEADS = LayerCut(CutKind.TABLE, (HEADS,))

LARGE = 1 << 22
"""Values of a linear layer's weight from which on it is cut by GATHER, if it is in none of the plan's lists.

Layers outside of the blocks make modulation and embed text: whole on every rank they would be 5 % of Wan's weights on four
ranks, and 17 % of an nvfp4 file's. The small ones are not worth a transfer."""

LayerCuts = Mapping[str, Mapping[str, LayerCut]]
"""Block list -> layer of its blocks -> how it is cut. A module outside the blocks is a list whose layer is "". In front of a
layer "*." stands for an index: a list inside a module has its blocks' layers so."""


def cut_of(plan: LayerCuts, parameter: str) -> LayerCut | None:
    """Of the layer of `parameter` (`<list>.<index>.<layer>.weight`). None: it is not cut."""
    name, _, rest = parameter.partition(".")
    layers, layer = plan.get(name, {}), rest.partition(".")[2].rpartition(".")[0]
    return layers.get(layer) or layers.get(f"*.{layer.partition('.')[2]}")


def cut_outside(plan: LayerCuts, layer: str, shape: tuple[int, ...], weight_readers: tuple[str, ...]) -> bool:
    """Whether the linear layer with a weight of `shape` is cut by GATHER, since it is large and outside of `plan`'s lists.

    Not if something reads its weight (Forward.weight_readers) instead of calling it.
    """
    rows, columns = shape
    return layer.partition(".")[0] not in plan and layer.rpartition(".")[0] not in weight_readers and rows * columns >= LARGE


def cut_side(
    cut: LayerCut, size: int, heads: int, head_size: int, index: int, ranks: int, key_heads: int | None = None
) -> tuple[Span, ...]:
    """Spans of rank `index` on a weight's cut side, which has `size` features. `key_heads`: see Sizes."""
    key_heads = key_heads or heads
    own = split(Span(0, key_heads), ranks)[index]
    features = {HEADS: heads // key_heads * head_size, KEY_HEADS: head_size}  # for each key head
    if cut.parts == (HEADS,):  # heads alone may have another size, as those of a second stream
        features[HEADS] = size // key_heads
    widths = cut.parts.count(WIDTH)
    rest = size - sum(key_heads * features[part] for part in cut.parts if part != WIDTH)
    spans, start = [], 0
    for part in cut.parts:
        if part != WIDTH:
            spans.append(Span(start + own.start * features[part], start + own.stop * features[part]))
            start += key_heads * features[part]
        else:
            spans.append(split(Span(start, start + rest // widths), ranks)[index])
            start += rest // widths
    assert start == size, "the plan's parts do not make up the weight"
    return tuple(spans)
