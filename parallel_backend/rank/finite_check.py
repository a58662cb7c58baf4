"""Which micro-step on this rank first gave a NaN or an infinity, and whether weights or adapters hold one."""

import itertools
from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

from parallel_backend.core.finite import NAMED, all_finite, checksum
from parallel_backend.rank.stage.linear import RankLinear

CHECKSUMS = 256
"""Micro-steps that a rank can still tell about: many more than are under way."""


class FiniteWatch:
    """Checksums of a rank's last results."""

    def __init__(self):
        self._sums: deque[tuple[int, int, torch.Tensor]] = deque(maxlen=CHECKSUMS)  # micro-step, its run, checksum

    def note(self, seq: int, run: int, result: torch.Tensor) -> None:
        """Result of micro-step `seq` of `run`: what is sent on, or the output. Never waits for the device."""
        self._sums.append((seq, run, checksum(result)))

    def first(self, run: int, since: int) -> int | None:
        """First micro-step of `run`, from number `since` on, whose result was not finite.

        Nothing is forgotten by asking: each band whose output is not finite asks, and all are told the same.
        """
        return next(
            (seq for seq, of, total in self._sums if of == run and seq >= since and not bool(total.isfinite())), None
        )


def bad_weights(model: nn.Module) -> tuple[str, ...]:
    """The first few parameters with values that are not finite; packed ones are not looked into."""
    return _first(name for name, parameter in model.named_parameters() if not all_finite(parameter))


def bad_adapters(model: nn.Module) -> tuple[str, ...]:
    """The first few layers with such an adapter."""
    return _first(
        name
        for name, module in model.named_modules()
        if isinstance(module, RankLinear)
        and not all(all_finite(factor) for pair in module.adapters for factor in pair if factor is not None)
    )


def _first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(itertools.islice(names, NAMED))
