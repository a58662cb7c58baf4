"""Finds NaN and infinite values: the first micro-step on this rank with one in its result, and weights and adapters."""

import itertools
from collections import deque
from collections.abc import Collection, Iterable

import torch
from torch import nn

from parallel_backend.core.finite import NAMED, all_finite, checksum
from parallel_backend.rank.stage.linear import RankLinear
from parallel_backend.rank.stage.store.weight_store import WeightStore

CHECKSUMS = 256
"""Micro-steps whose checksums are kept: many more than are in progress."""


class FiniteWatch:
    """Checksums of the rank's last results."""

    def __init__(self):
        self._sums: deque[tuple[int, int, torch.Tensor]] = deque(maxlen=CHECKSUMS)  # micro-step, its run, checksum

    def note(self, seq: int, run: int, result: torch.Tensor) -> None:
        """Keep the checksum of the result of micro-step `seq` of `run`. Never waits for the device."""
        self._sums.append((seq, run, checksum(result)))

    def first(self, run: int, since: int) -> int | None:
        """First micro-step of `run`, from number `since` on, whose result was not finite.

        Checksums are kept, so that all bands of a call, which ask one by one, get the same answer.
        """
        return next(
            (seq for seq, of, total in self._sums if of == run and seq >= since and not bool(total.isfinite())), None
        )


def bad_weights(model: nn.Module, store: WeightStore, changed: Collection[str]) -> tuple[str, ...]:
    """Names of the first few parameters with values that are not finite. Packed parameters are not checked.

    `changed`: names of parameters that hold additions, which are left out.
    """

    def finite(name: str, parameter: nn.Parameter) -> bool:
        if parameter.is_floating_point():
            store.present(name)
        return all_finite(parameter)

    named = (each for each in model.named_parameters() if each[0] not in changed)
    return _first(name for name, parameter in named if not finite(name, parameter))


def bad_adapters(model: nn.Module, changed: Collection[str]) -> tuple[str, ...]:
    """Names of the first few parameters with additions that are not finite. `changed`: those that hold them."""
    layers = (
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, RankLinear)
        and not all(all_finite(factor) for pair in module.adapters for factor in pair if factor is not None)
    )
    return _first((*layers, *(name for name in changed if not all_finite(model.get_parameter(name)))))


def _first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(itertools.islice(names, NAMED))
