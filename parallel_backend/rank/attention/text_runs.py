"""A causal text as runs of tokens that see the same keys, as those of a reference picture do, and of words.

A run whose tokens see the same keys needs no mask: any kernel can attend, and no mask of all tokens by all is made.
"""

import itertools
from typing import NamedTuple

import torch

from parallel_backend.core.spans import Span

LEAST = 16
"""Tokens of a run without a mask: fewer are not worth a call of their own."""


class TextRun(NamedTuple):
    """Text tokens side by side. `sees`: how many of the text's first tokens they see, at most. `alike`: all see as many."""

    tokens: Span
    sees: int
    alike: bool


def text_runs(ends_T: torch.Tensor) -> tuple[TextRun, ...]:
    """The runs of a text whose tokens see so many of its first tokens. `ends_T` is read on the host."""
    runs: list[TextRun] = []
    start = 0
    for end, group in itertools.groupby(ends_T.tolist()):
        stop = start + len(list(group))
        alike = stop - start >= LEAST
        if runs and not alike and not runs[-1].alike:
            last = runs.pop()
            runs.append(TextRun(Span(last.tokens.start, stop), max(last.sees, end), False))
        else:
            runs.append(TextRun(Span(start, stop), end, alike))
        start = stop
    return tuple(runs)
