"""LoRA and other weight patches of ComfyUI's ModelPatcher, as what the ranks add to their weights.

Only what does not depend on the weight itself can be added beside it: those are on the ranks, perhaps packed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import comfy.lora
import comfy.utils
import comfy.weight_adapter
import torch

from parallel_backend.client.lora import Delta
from parallel_backend.core.spans import Span

PREFIX = "diffusion_model."
Patch = tuple[float, Any, float, tuple[int, int, int] | None, Callable[[torch.Tensor], torch.Tensor] | None]
"""ComfyUI's: strength, adapter or ("diff", tensors) and the like, strength of the model, (dim, start, length) of the weight
that it is for, function of what is added."""

DORA_SCALE = {"lora": 4, "loha": 7, "lokr": 8}
"""Adapters whose product does not depend on the weight, and which of their `weights` makes it do so all the same."""
ALPHA = 2
"""Place in their `weights` of what scales their product, beside the strength."""
LORA_MID, LORA_RESHAPE = 3, 5
"""Places in a LoRA's `weights` of a third factor, and of the shape that it makes the weight have."""
SENT_AS_IS = (torch.float32, torch.bfloat16, torch.float16)


class NativeWeights:
    """Weights of a checkpoint under the names that this ComfyUI's own model class has for them.

    Files may have others: the names of Flux's norms have changed between ComfyUI's versions.
    """

    def __init__(self, original: Mapping[str, torch.Tensor], model_config: Any):
        """`original`: tensors on the meta device by key in original layout; `model_config`: ComfyUI's, as it detected it."""
        self.tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[str, str] = {}
        for key, tensor in original.items():
            renamed = model_config.process_unet_state_dict({key: tensor})
            self.tensors |= renamed
            self._keys |= dict.fromkeys(renamed, key)

    def check(self, key: str, patch: Patch) -> None:
        """ValueError, in the user's words, unless `deltas` can say what the patch adds."""
        name, shape = self._find(key)
        if (why := why_not(patch, _region(shape, patch[3]))) is not None:
            raise ValueError(
                f"model: {why} (for {name}) cannot be added to Parallel DiT's weights, which are on its ranks. Remove the "
                "node that adds it, use a LoRA of the kind LoRA, LoHa or LoKr, or merge it into the checkpoint."
            )

    def deltas(self, patches: Mapping[str, list[Patch]]) -> Iterator[Delta]:
        """What checked patches (a ModelPatcher's `patches`) add to the checkpoint's tensors."""
        for key, added in patches.items():
            name, shape = self._find(key)
            for patch in added:
                if patch[0] != 0.0:
                    yield self._delta(name, shape, patch)

    def _find(self, key: str) -> tuple[str, torch.Size]:
        """Name and shape of the weight that ComfyUI calls `key`."""
        name = key.removeprefix(PREFIX)
        if name not in self.tensors:
            raise ValueError(f"model: a patch for {key}, which is no weight of the transformer, cannot reach the ranks.")
        return name, self.tensors[name].shape

    def _delta(self, name: str, shape: torch.Size, patch: Patch) -> Delta:
        strength, value, strength_model, offset, function = patch
        rows = None
        if offset is not None and offset[0] == 0:
            rows, offset = Span(offset[1], offset[1] + offset[2]), None
            shape = _region(shape, patch[3])
        if offset is None and function in (None, comfy.utils.swap_scale_shift) and _low_rank(value, shape):
            up, down, alpha = (value.weights[index] for index in (0, 1, 2))
            scale = strength * (1.0 if alpha is None else alpha / len(down))
            up, down = (factor if factor.dtype in SENT_AS_IS else factor.float() for factor in (up, down))
            up = up.flatten(1) if function is None else function(up.flatten(1))
            return Delta(self._keys[name], up, down.flatten(1), scale, rows)
        # ComfyUI's own arithmetic, on a weight of zeros.
        whole = comfy.lora.calculate_weight([(strength, value, strength_model, offset, function)], torch.zeros(shape), name)
        if not whole.any() and all(factor.any() for factor in _tensors(value)):
            raise ValueError(f"model: the {value.name} for {name} does not fit this model: {name} is {list(shape)}.")
        return Delta(self._keys[name], whole, None, 1.0, rows)


def why_not(patch: Patch, region: torch.Size) -> str | None:
    """What is in the way of adding the patch beside a weight of this shape, in the user's words; None if nothing is."""
    strength, value, strength_model, _, _ = patch
    if not math.isfinite(strength):
        return f"something at the strength {strength}"
    if strength_model != 1.0 or isinstance(value, list):
        return "a merge of models, or a factor on the weight itself,"
    if strength == 0.0:
        return None
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        if value.name not in DORA_SCALE:
            return f"{value.name.upper()}, which turns the weight itself,"
        if value.weights[DORA_SCALE[value.name]] is not None:
            return "DoRA, which scales the weight itself,"
        if (alpha := value.weights[ALPHA]) is not None and not math.isfinite(alpha):
            return f"a {value.name.upper()} with the alpha {alpha}"
        if value.name == "lora" and any(factor.ndim < 2 or 0 in factor.shape for factor in value.weights[:2]):
            return "a LoRA without a rank"
        if value.name == "lora" and value.weights[LORA_RESHAPE] is not None:
            return "a LoRA that enlarges the weight"
        if value.name == "lora" and value.weights[LORA_MID] is None and _product_shape(value).numel() != region.numel():
            return f"a LoRA for a weight of {list(_product_shape(value))}, where this model has {list(region)},"
        return None
    kind, tensors = ("diff", value) if len(value) == 1 else value
    if kind != "diff":
        return f"the patch kind '{kind}'"
    if tensors[0].shape != region:
        return f"a difference of shape {list(tensors[0].shape)}, where this model has {list(region)},"
    return None


def _region(shape: torch.Size, offset: tuple[int, int, int] | None) -> torch.Size:
    """Shape of the part of a weight that an offset leaves."""
    if offset is None:
        return shape
    dim, _, length = offset
    return torch.Size([length if axis == dim else size for axis, size in enumerate(shape)])


def _product_shape(lora: comfy.weight_adapter.LoRAAdapter) -> torch.Size:
    return torch.Size((len(lora.weights[0]), lora.weights[1].flatten(1).shape[1]))


def _low_rank(value: Any, shape: torch.Size) -> bool:
    """Whether the factors can go as they are: a plain LoRA on a matrix."""
    plain = isinstance(value, comfy.weight_adapter.LoRAAdapter) and value.weights[LORA_MID] is None
    return plain and _product_shape(value) == shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for part in getattr(value, "weights", value):
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, tuple):
            yield from _tensors(part)
