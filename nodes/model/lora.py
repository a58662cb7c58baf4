"""LoRA and other weight patches of ComfyUI's ModelPatcher, as Deltas for the ranks.

A patch that does not depend on the weight is sent as it is, and added on the ranks, whose weights may be quantised. For a
patch that does (a merge of models, DoRA) ComfyUI's functions compute the new weight here, which replaces the ranks' weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import comfy.lora
import comfy.utils
import comfy.weight_adapter
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.original import OriginalTensors
from parallel_backend.client.lora import Delta
from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span

from .adapter_factors import why_unfit

PREFIX = "diffusion_model."
Patch = tuple[float, Any, float, tuple[int, int, int] | None, Callable[[torch.Tensor], torch.Tensor] | None]
"""ComfyUI's patch: strength, adapter or ("diff", tensors) and the like, strength of the weight itself, (dim, start, length)
of the weight's part that it changes, function that is applied to what is added."""

DORA_SCALE = {"lora": 4, "loha": 7, "lokr": 8}
"""Adapters whose product does not depend on the weight -> index of the DoRA scale in their `weights`, with which it does."""
ALPHA = 2
"""Index of alpha in their `weights`, which scales the product together with the strength."""
LORA_MID, LORA_RESHAPE = 3, 5
"""Indices in a LoRA's `weights` of a third factor, and of the shape that the weight is enlarged to."""
SENT_AS_IS = (torch.float32, torch.bfloat16, torch.float16)
MODEL_AS_LORA = "model_as_lora"
"""Kind of a patch in a conditioning: the difference to another model's weight."""
KINDS = ("diff", "set", MODEL_AS_LORA)


class NativeWeights:
    """Weights of a checkpoint under the names that this version of ComfyUI's model class has for them.

    A file may have other names: those of Flux's norms have changed between versions of ComfyUI.
    """

    def __init__(self, checkpoint: Checkpoint, original: dict[str, torch.Tensor], model_config: Any, dtype: torch.dtype):
        """`original`: tensors on the meta device by their name in the original layout; `model_config`: detected by ComfyUI.

        `dtype`: in which ranks compute.
        """
        self.original, self.dtype = original, dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[str, str] = {}  # ComfyUI's name -> name in the original layout
        self._values = OriginalTensors(checkpoint)
        self._computed = frozenset(checkpoint.family.file.computed(checkpoint.config))
        for key, tensor in original.items():
            renamed = model_config.process_unet_state_dict({key: tensor})
            self.tensors |= renamed
            self._keys |= dict.fromkeys(renamed, key)
        modules = {name.rpartition(".")[0] for name in self.tensors}
        self._with_modules = {above for module in modules for above in _above(module)}

    def read_from(self, checkpoint: Checkpoint) -> None:
        """Take values from these files, which hold a model of the same kind."""
        self._values = OriginalTensors(checkpoint)

    def check(self, key: str, patch: Patch, hooked: bool = False) -> None:
        """ValueError for the user, unless `deltas` can express the patch. `hooked`: it is a conditioning's (a hook)."""
        name, shape = self._find(key)
        region = _region(shape, patch[3])
        why = why_not(patch, region) or (why_not_hooked(patch) if hooked else None)
        if why is not None:
            raise ValueError(
                f"model: {why} (for {name}) cannot be added to Parallel DiT's weights, which are on its ranks. Remove the "
                "node that adds it, use a LoRA of the kind LoRA, LoHa or LoKr, or merge it into the checkpoint."
            )

    def deltas(self, patches: Mapping[str, list[Patch]], group: int = 0) -> Iterator[Delta]:
        """The Deltas of checked patches (a ModelPatcher's `patches`). `group`: 0, or the number of a conditioning's hook."""
        for key, key_patches in patches.items():
            name, shape = self._find(key)
            if not self.is_patched(key, hooked=group > 0):
                continue
            if group == 0 and any(map(depends_on_weight, key_patches)):
                value = self.patched(key, key_patches)
                yield Delta(self._keys[name], value.to(self.dtype) if value.ndim == 2 else value, instead=True)
                continue
            for patch in key_patches:
                if patch[0] != 0.0:
                    yield self._delta(name, shape, patch, group)

    def patched(self, key: str, patches: list[Patch]) -> torch.Tensor:
        """The checkpoint's value with these patches, float32, computed by ComfyUI's functions.

        ValueError for an adapter of the wrong size, which ComfyUI would only log and leave out.
        """
        name, _ = self._find(key)
        value = self._values.value(self._keys[name])
        for patch in patches:
            adapter = patch[1] if isinstance(patch[1], comfy.weight_adapter.WeightAdapterBase) and patch[0] else None
            before = value.clone() if adapter else value  # calculate_weight may write into its argument
            value = _calculated(patch, value, name)
            if adapter and torch.equal(before, value) and all(factor.any() for factor in _tensors(adapter)):
                raise ValueError(_unfit(adapter, name, value.shape))
        return value

    def is_patched(self, key: str, hooked: bool = False) -> bool:
        """Whether ComfyUI applies patches for this key. It keeps but ignores patches for tensors of a module that has
        submodules, such as Wan's `blocks.0.modulation` and SD3's table of positions, unless they are in a conditioning.
        """
        name, _ = self._find(key)
        return self._keys[name] not in self._computed and (hooked or name.rpartition(".")[0] not in self._with_modules)

    def stored(self, key: str) -> torch.Tensor | None:
        """The checkpoint's value as it is in the file. See OriginalTensors.stored."""
        return self._values.stored(self._keys[self._find(key)[0]])

    def _find(self, key: str) -> tuple[str, torch.Size]:
        """Name and shape of the weight that ComfyUI calls `key`."""
        name = key.removeprefix(PREFIX)
        if name not in self.tensors:
            raise ValueError(f"model: a patch for {key}, which is no weight of the transformer, cannot reach the ranks.")
        return name, self.tensors[name].shape

    def _delta(self, name: str, shape: torch.Size, patch: Patch, group: int) -> Delta:
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
            return Delta(self._keys[name], up, down.flatten(1), scale, rows, group)
        # Applied to a weight of zeros, ComfyUI's functions give the sum that the patch adds.
        original = {name: [(self._values.value(self._keys[name]),)]} if _kind(value) == MODEL_AS_LORA else None
        patch = strength, value, strength_model, offset, function
        whole = _calculated(patch, torch.zeros(shape), name, original_weights=original)
        if not whole.any() and all(factor.any() for factor in _tensors(value)) and _kind(value) != MODEL_AS_LORA:
            raise ValueError(_unfit(value, name, shape))
        return Delta(self._keys[name], whole, None, 1.0, rows, group)


def depends_on_weight(patch: Patch) -> bool:
    """Whether what a checked patch adds depends on the weight itself."""
    strength, value, strength_model, _, _ = patch
    if strength_model != 1.0 or isinstance(value, list):
        return True
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        turned = value.name not in DORA_SCALE or value.weights[DORA_SCALE[value.name]] is not None
        return strength != 0.0 and turned
    return _kind(value) == "set"


def why_not(patch: Patch, region: torch.Size) -> str | None:
    """The obstacle, as the subject of a sentence for the user, to a patch for a weight of the shape `region`. None: none."""
    strength, value, strength_model, _, _ = patch
    if not (math.isfinite(strength) and math.isfinite(strength_model)):
        return f"something at the strength {strength if strength_model == 1.0 else strength_model}"
    if isinstance(value, list):
        if value[0][0].shape != region:
            return f"a merge with a weight of {list(value[0][0].shape)}, where this model has {list(region)},"
        return next((why for patch in value[1:] if (why := why_not(patch, _region(region, patch[3])))), None)
    if strength == 0.0 and _kind(value) != "set":
        return None
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        if value.name in DORA_SCALE and (alpha := value.weights[ALPHA]) is not None and not math.isfinite(alpha):
            return f"a {value.name.upper()} with the alpha {alpha}"
        if value.name == "lora" and value.weights[LORA_RESHAPE] is not None:
            return "a LoRA that enlarges the weight"
        return why_unfit(value.name, value.weights, tuple(region)) if value.name in DORA_SCALE else None
    if (kind := _kind(value)) not in KINDS:
        return f"the patch kind '{kind}'"
    tensor = (value if len(value) == 1 else value[1])[0]
    if tensor.shape != region:
        return f"a difference of shape {list(tensor.shape)}, where this model has {list(region)},"
    return None


def why_not_hooked(patch: Patch) -> str | None:
    """The obstacle to such a patch in a conditioning, where each call may have another strength. None: there is none."""
    if not depends_on_weight(patch):
        return None
    kind = patch[1].name.upper() if isinstance(patch[1], comfy.weight_adapter.WeightAdapterBase) else "a whole weight"
    return f"{kind} in a conditioning (a hook), where it would be worked out anew for each call,"


def _above(module: str) -> Iterator[str]:
    """Names of the modules that a module is in, up to the model itself: ''."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _kind(value: Any) -> str:
    """Kind of a patch's value, such as "diff" or "set". '' for adapters and lists."""
    if not isinstance(value, tuple):
        return ""
    return "diff" if len(value) == 1 else value[0]


def _calculated(patch: Patch, weight: torch.Tensor, name: str, **more: Any) -> torch.Tensor:
    """comfy.lora.calculate_weight. ValueError for an adapter whose tensors it cannot compute with."""
    try:
        return comfy.lora.calculate_weight([patch], weight, name, **more)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        if not isinstance(patch[1], comfy.weight_adapter.WeightAdapterBase):
            raise
        raise ValueError(f"{_unfit(patch[1], name, weight.shape)} ({short(error, 200)})") from None


def _unfit(adapter: comfy.weight_adapter.WeightAdapterBase, name: str, shape: torch.Size) -> str:
    factors = ", ".join(str(list(factor.shape)) for factor in _tensors(adapter))
    return (
        f"model: the {adapter.name.upper()} for {name} does not fit this model: {name} is {list(shape)}, the adapter's "
        f"tensors are {short(factors, 200)}."
    )


def _region(shape: torch.Size, offset: tuple[int, int, int] | None) -> torch.Size:
    """Shape of the part of a weight that an offset leaves."""
    if offset is None:
        return shape
    dim, _, length = offset
    return torch.Size([length if axis == dim else size for axis, size in enumerate(shape)])


def _product_shape(lora: comfy.weight_adapter.LoRAAdapter) -> torch.Size:
    return torch.Size((len(lora.weights[0]), lora.weights[1].flatten(1).shape[1]))


def _low_rank(value: Any, shape: torch.Size) -> bool:
    """Whether the factors can be sent instead of their product: a plain LoRA on a matrix."""
    plain = isinstance(value, comfy.weight_adapter.LoRAAdapter) and value.weights[LORA_MID] is None
    return plain and _product_shape(value) == shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for part in getattr(value, "weights", value):
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, tuple):
            yield from _tensors(part)
