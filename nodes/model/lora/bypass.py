"""LoRA in bypass mode: ComfyUI adds the adapter's output to the layer's and does not change the weight, as ranks do."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.weight_adapter

from ...ui.host import refuse
from .lora import DORA_SCALE, PREFIX, NativeWeights
from .patch_trial import Patch

MANAGER = "BypassInjectionManager"
"""ComfyUI's class that creates the injections of a LoRA in bypass mode."""


def bypass_patches(injections: Mapping[str, Iterable[Any]]) -> dict[str, list[Patch]]:
    """Convert `injections` to weight patches, by key of the weight. `check_injections` must have accepted them."""
    patches: dict[str, list[Patch]] = {}
    for by_key in injections.values():
        for injection in by_key:
            manager = _manager(injection)
            assert manager is not None  # `check_injections` has refused others
            without_effect = _not_placed(manager)
            for layer, (adapter, strength) in manager.adapters.items():
                if layer not in without_effect:
                    patches.setdefault(f"{layer}.weight", []).append((strength, _plain(adapter), 1.0, None, None))
    return patches


def check_injections(weights: NativeWeights, key: str, injections: Iterable[Any]) -> None:
    """Raise ValueError unless each injection is a LoRA in bypass mode of a kind that is added to a layer's output."""
    for injection in injections:
        if (manager := _manager(injection)) is None:
            refuse(f"another node's injection into the model ('{key}')", "Remove that node.")
        if missed := [layer for layer in _not_placed(manager) if f"{layer}.weight".removeprefix(PREFIX) in weights.tensors]:
            refuse(f"a LoRA in bypass mode for {missed[0]}", "Use a plain LoRA loader for it.")
    for target, patches in bypass_patches({key: injections}).items():
        for patch in patches:
            adapter = patch[1]
            if getattr(adapter, "name", "") not in DORA_SCALE:
                kind = getattr(adapter, "name", type(adapter).__name__).upper()
                refuse(f"{kind} in bypass mode", "Use a plain LoRA loader for it.")
            if not weights.check(target, patch):
                refuse(
                    f"a LoRA in bypass mode for {target.removeprefix(PREFIX)}, which has a different size here,",
                    "Use a plain LoRA loader. It leaves such layers out.",
                )


def _manager(injection: Any) -> Any | None:
    """ComfyUI's BypassInjectionManager that created the injection. None: something else created it."""
    function = inspect.unwrap(injection.inject)
    if not inspect.isfunction(function):
        return None
    manager = inspect.getclosurevars(function).nonlocals.get("self")
    return manager if type(manager).__name__ == MANAGER else None


def _not_placed(manager: Any) -> list[str]:
    """Return keys of adapters for which the manager found no layer, such as Z-Image's pad tokens. They have no effect."""
    placed = {id(hook.adapter) for hook in manager.hooks}
    return [layer for layer, (adapter, _) in manager.adapters.items() if id(adapter) not in placed]


def _plain(adapter: Any) -> Any:
    """Return the adapter without DoRA scale and without a larger weight shape, which ComfyUI ignores in bypass mode."""
    scale = DORA_SCALE.get(getattr(adapter, "name", ""))
    if scale is None:
        return adapter
    weights = tuple(
        None if index == scale or isinstance(weight, list) else weight for index, weight in enumerate(adapter.weights)
    )
    assert isinstance(adapter, comfy.weight_adapter.WeightAdapterBase)
    return type(adapter)(adapter.loaded_keys, weights)
