"""Finds weights and adapters with NaN or infinite values."""

import itertools
from collections.abc import Collection, Iterable

from torch import nn

from parallel_backend.core.finite import NAMED, all_finite
from parallel_backend.rank.stage.linear import RankLinear
from parallel_backend.rank.stage.store.weight_store import WeightStore


def bad_weights(model: nn.Module, store: WeightStore, changed: Collection[str]) -> tuple[str, ...]:
    """Return the names of the first few parameters with NaN or infinite values. Packed parameters are not checked.
    `changed`: names of parameters that contain additions, which are skipped."""

    def finite(name: str, parameter: nn.Parameter) -> bool:
        if parameter.is_floating_point():
            store.present(name)
        return all_finite(parameter)

    named = (each for each in model.named_parameters() if each[0] not in changed)
    return _first(name for name, parameter in named if not finite(name, parameter))


def bad_adapters(model: nn.Module, changed: Collection[str]) -> tuple[str, ...]:
    """Return the names of the first few parameters whose additions have NaN or infinite values. `changed`: those that
    contain additions."""
    layers = (
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, RankLinear)
        and not all(all_finite(factor) for pair in module.adapters for factor in pair if factor is not None)
    )
    return _first((*layers, *(name for name in changed if not all_finite(model.get_parameter(name)))))


def _first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(itertools.islice(names, NAMED))
