"""Tensor parallelism as data: which linear layers are cut, on which side, and at which features."""

import itertools
from collections.abc import Mapping
from enum import Enum

from parallel_backend.core.own_class import OwnCut
from parallel_backend.core.spans import Span, split_units


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


LayerCuts = Mapping[str, OwnCut]
"""Layer's name in the model -> its cut."""


def cut_of(plan: LayerCuts, parameter: str) -> OwnCut | None:
    """Cut of the layer of `parameter`. None: the layer is not cut."""
    return plan.get(parameter.rpartition(".")[0])


def cut_side(cut: OwnCut, size: int, index: int, ranks: int) -> tuple[Span, ...]:
    """Spans of rank `index` on a weight's cut side of `size` features: one span for each part."""
    assert sum(cut.sizes) == size, "the plan's parts do not make up the weight"
    parts = zip(itertools.accumulate(cut.sizes), cut.sizes, cut.units or cut.sizes, strict=True)
    return tuple(split_units(Span(end - part, end), ranks, units)[index] for end, part, units in parts)
