"""Finds the effect of a patch: ComfyUI's own functions try it on a weight that has a shape and no values."""

from collections.abc import Callable, Sequence
from typing import Any

import comfy.lora
import comfy.weight_adapter
import torch

from parallel_backend.core.short_text import short

Patch = tuple[float, Any, float, tuple[int, int, int] | None, Callable[[torch.Tensor], torch.Tensor] | None]
"""ComfyUI's patch, a tuple of five: strength; adapter, or a tuple such as ("diff", tensors); strength of the weight itself;
(dim, start, length) of the part of the weight that it changes; function applied to the addition."""
FAILS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors that ComfyUI's functions raise for tensors with which they cannot compute."""


def shape_after(patches: Sequence[Patch], shape: torch.Size) -> torch.Size:
    """Return the shape of a weight after the patches; some of them may enlarge it. `shape`: before them."""
    return torch.Size(comfy.lora.calculate_shape(patches, torch.empty(shape, device="meta"), ""))


def is_applied(patch: Patch, name: str, shape: torch.Size) -> bool:
    """Whether ComfyUI changes the weight `name` of this shape by the patch. It only logs a patch of another size. Raises
    ValueError, with a text for the user, if ComfyUI itself fails with the patch."""
    strength, value, _, offset, function = patch
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):  # without alpha, by which OFT decides on values
        weights = tuple(0.0 if isinstance(each, int | float) else each for each in value.weights)
        value = type(value)(value.loaded_keys, weights)
    # Outside of inference mode torch counts the changes of a tensor in `_version`.
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.empty(shape, device="meta")
        padded = comfy.lora.pad_tensor_to_shape(weight, [*_enlarged(patch, name, shape)])
        before = weight._version
        after = calculated((strength or 1.0, value, 1.0, offset, function), weight, name)
        return after._version > (before if after is weight else padded._version)


def calculated(patch: Patch, weight: torch.Tensor, name: str, **more: Any) -> torch.Tensor:
    """Return the result of comfy.lora.calculate_weight. Raises ValueError, with a text for the user, if that fails."""
    try:
        return comfy.lora.calculate_weight([patch], weight, name, **more)
    except FAILS as error:
        raise _failed(patch, name, weight.shape, error) from None


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an adapter, or of another patch's value."""
    parts = getattr(value, "weights", value if isinstance(value, tuple) else ())
    found = []
    for part in parts:
        found += [part] if isinstance(part, torch.Tensor) else tensors_of(part) if isinstance(part, tuple) else []
    return found


def _enlarged(patch: Patch, name: str, shape: torch.Size) -> torch.Size:
    larger = shape_after([patch], shape)
    if len(larger) != len(shape) or any(after < before for before, after in zip(shape, larger, strict=True)):
        raise _failed(patch, name, shape, ValueError(f"it makes {list(larger)} of the weight"))
    return larger


def _failed(patch: Patch, name: str, shape: torch.Size, error: Exception) -> ValueError:
    kind = patch[1].name.upper() if isinstance(patch[1], comfy.weight_adapter.WeightAdapterBase) else "difference"
    sizes, why = ", ".join(str(list(each.shape)) for each in tensors_of(patch[1])), short(str(error).rstrip("."), 200)
    return ValueError(
        f"model: ComfyUI cannot compute with the {kind} for {name} ({why}): {name} is {list(shape)}, the "
        f"tensors for it are {short(sizes, 200)}. The file is damaged, or was made for another model: use another one."
    )
