"""Finds weights and adapters with NaN or infinite values."""

import itertools
from collections.abc import Collection, Iterable

from torch import nn

from parallel_backend.core.finite import NAMED, all_finite
from parallel_backend.rank.stage.linear import PackedLinear, RankLinear
from parallel_backend.rank.stage.store.weight_store import WeightStore


def bad_weights(model: nn.Module, store: WeightStore, changed: Collection[str]) -> tuple[str, ...]:
    """Names of the first few parameters with values that are not finite. Of packed ones only scales of 16 and 32 bits are
    checked.

    `changed`: names of parameters that hold additions, which are left out.
    """

    def finite(name: str, parameter: nn.Parameter) -> bool:
        if parameter.is_floating_point():
            store.present(name)
        return all_finite(parameter)

    def finite_scales(name: str, layer: PackedLinear) -> bool:
        store.present(name)
        return all(all_finite(scale) for scale in layer.packing.tensors.values() if scale.itemsize > 1)

    named = (each for each in model.named_parameters() if each[0] not in changed)
    packed = ((f"{name}.weight", each) for name, each in model.named_modules() if isinstance(each, PackedLinear))
    return _first(
        itertools.chain(
            (name for name, parameter in named if not finite(name, parameter)),
            (name for name, layer in packed if not finite_scales(name, layer)),
        )
    )


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
