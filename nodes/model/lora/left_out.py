"""Layers of a LoRA that do not fit the model. ComfyUI only logs them; here the user is told."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...ui.node_text import say
from .lora import PREFIX, NativeWeights
from .patch_trial import Patch, shape_after, tensors_of

log = logging.getLogger(__name__)

UNNAMED = "no layer of this LoRA is in this model, so it changes nothing"


def fitting(
    weights: NativeWeights, added: Sequence[tuple[str, Patch]], present: Mapping[str, list[Patch]], hooked: bool = False
) -> list[bool]:
    """For each (key, patch) in `added`, whether ComfyUI applies it. A line on the node says how many are left out.

    `present`: existing patches, by key. `hooked`: the patches are a conditioning's (a hook). Raises ValueError for a patch
    that ranks cannot add, and if all of a LoRA is left out.
    """
    before = {key: list(patches) for key, patches in present.items()}
    fits = []
    for key, patch in added:
        patches = before.setdefault(key, [])
        fits.append(weights.check(key, patch, patches, hooked))
        if fits[-1]:
            patches.append(patch)
    if not all(fits):
        _tell_of(weights, fits, *added[fits.index(False)], before)
    return fits


def tell(text: str, why: str = "") -> None:
    """Show a line on the node. `why`: only for the log."""
    log.warning("Parallel DiT: %s%s", text, f" ({why})" if why else "")
    say(f"Parallel DiT: {text}")


def _tell_of(weights: NativeWeights, fits: list[bool], key: str, patch: Patch, before: dict[str, list[Patch]]) -> None:
    """Tell the user about patches that do not fit. `key`, `patch`: the first of them."""
    count, name = len(fits), key.removeprefix(PREFIX)
    sizes = ", ".join(str(list(each.shape)) for each in tensors_of(patch[1]))
    example = f"{name} is {list(shape_after(before[key], weights.tensors[name].shape))}, the tensors for it are {sizes}"
    if not any(fits) and not (count == 1 and _is_part(patch[1])):
        layers = f"none of its {count} layers fits" if count > 1 else "its only layer does not fit"
        raise ValueError(
            f"model: this LoRA is for another model: {layers} ({example}). Use a LoRA that was made for this model."
        )
    what = f"{fits.count(False)} of {count} layers of this LoRA do not fit this model and are left out"
    if count == 1:
        what = f"{name} of this LoRA does not fit this model and is left out"
    tell(what, example)


def _is_part(value: Any) -> bool:
    """Whether an adapter comes from a file with more layers: some packs add a LoRA layer by layer."""
    return len(getattr(value, "loaded_keys", ())) > len(getattr(value, "weights", ()))
