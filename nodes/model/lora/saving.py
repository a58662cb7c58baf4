"""The file's values of a MODEL whose weights are on ranks, for nodes that merge, save or extract weights.

The values are views of the mapped file, and take no memory until they are used. A patched value is computed on the CPU when
ComfyUI asks for it.
"""

from collections.abc import Mapping
from typing import Any

import comfy.float
import comfy.model_patcher
import comfy.utils
import torch

from ...ui.host import refuse
from .lora import PREFIX, NativeWeights
from .patch_trial import Patch


def stored_weights(weights: NativeWeights, what: str) -> dict[str, torch.Tensor]:
    """Return key -> the file's value. Raises ValueError for a file with quantized values. `what`: the action that needs the
    values."""
    try:
        stored = {PREFIX + name: weights.stored(PREFIX + name) for name in weights.tensors}
    except ValueError as error:
        refuse(f"{what} ({error})", "Load the model with ComfyUI's own loader, or use a file in bf16 or fp16.")
    return {key: value for key, value in stored.items() if value is not None}


def key_patches(
    stored: Mapping[str, torch.Tensor], patches: Mapping[str, list[Patch]], prefix: str | None
) -> dict[str, list]:
    """Return the same as ModelPatcher.get_key_patches: values and patches by key, which a merge adds to another MODEL."""
    return {
        key: [(value, _as_it_is), *patches.get(key, ())]
        for key, value in stored.items()
        if prefix is None or key.startswith(prefix)
    }


def patched_weight(weights: NativeWeights, key: str, patches: list[Patch], dtype: torch.dtype) -> torch.Tensor:
    """Return the value with its patches in the file's dtype, rounded as by ComfyUI."""
    return comfy.float.stochastic_rounding(weights.patched(key, patches), dtype, seed=comfy.utils.string_to_seed(key))


def for_saving(patcher: comfy.model_patcher.ModelPatcher, weights: NativeWeights, prefix: str) -> dict[str, torch.Tensor]:
    """Return key without `prefix` -> the value to save. ComfyUI computes patched values while it writes the file."""
    saved = {}
    for key, value in stored_weights(weights, "saving the model").items():
        patched = key in patcher.patches and weights.is_patched(key)
        saved[key.removeprefix(prefix)] = comfy.model_patcher.LazyCastingParam(patcher, key, value) if patched else value
    return saved


def _as_it_is(weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return weight
