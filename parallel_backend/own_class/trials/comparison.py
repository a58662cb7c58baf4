"""Result of comparing a trial's run with the whole model's. An empty text: they agree."""

import math
from collections.abc import Callable, Iterable

import torch

from parallel_backend.own_class.calls.tried_calls import distance
from parallel_backend.own_class.calls.unproven import Unproven, first_line

TOLERANCE = 1e-5
"""Largest difference from the whole model's values, as a share of its largest value."""


def difference(what: str, out: torch.Tensor, whole: torch.Tensor) -> str:
    """`what`, with the difference, if an output is not the whole model's but for rounding."""
    far = distance(out, whole) if out.shape == whole.shape else math.inf
    return "" if far <= TOLERANCE else f"{what} (by {far:.1e} of the largest value)"


def close(a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor | None = None) -> bool:
    """Whether both are equal but for rounding, by the largest value of `whole`, or else of `b`."""
    if a.shape != b.shape or not a.numel():  # a sequence rank may have no token of a stream
        return a.shape == b.shape
    return bool((a - b).abs().max() <= TOLERANCE * (b if whole is None else whole).abs().max())


def why_not(run: Callable[[], str], fails: str, before: str = "") -> str:
    """What `run` returns, or the text of the Unproven that it raises, with `before` in front of it. For another error
    `fails`, with its first line."""
    try:
        return run()
    except Unproven as unproven:
        return f"{before}{unproven}"
    except Exception as error:  # of any kind: a class's code is not known
        return f"{fails} ({first_line(error)})"


def first_why_not(runs: Iterable[Callable[[], str]], fails: str) -> str:
    """The first text that is not empty, see `why_not`. Later runs are not started."""
    return next(filter(None, (why_not(run, fails) for run in runs)), "")
