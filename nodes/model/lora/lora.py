"""LoRA and other weight patches of ComfyUI's ModelPatcher, as Deltas for the ranks.

A patch that does not depend on the weight is sent as it is, and added on the ranks, whose weights may be quantized. If it
does (a merge of models, DoRA), ComfyUI's functions compute the new weight here, which replaces the ranks' weight.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.utils
import comfy.weight_adapter
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import stored_value, values_of
from parallel_backend.client.lora import Delta
from parallel_backend.core.own_class import OwnClass
from parallel_backend.core.setup import TensorSizes
from parallel_backend.core.spans import Span

from .patch_trial import Patch, calculated, is_applied, shape_after

PREFIX = "diffusion_model."

DORA_SCALE = {"lora": 4, "loha": 7, "lokr": 8}
"""Adapters whose product does not depend on the weight, unless they have a DoRA scale -> index of that scale in their
`weights`."""
ALPHA = 2
"""Index of alpha in their `weights`. It scales the product together with the strength."""
LORA_MID = 3
"""Index of a third factor in a LoRA's `weights`."""
SENT_AS_IS = (torch.float32, torch.bfloat16, torch.float16)
MODEL_AS_LORA = "model_as_lora"
"""Kind of a patch in a conditioning: the difference to another model's weight."""
KINDS = ("diff", "set", MODEL_AS_LORA)


class NativeWeights:
    """Weights of a checkpoint, under the names that this version of ComfyUI's model class has for them. A file may have
    other names: those of Flux's norms have changed between versions of ComfyUI."""

    def __init__(self, checkpoint: Checkpoint, own: OwnClass, dtype: torch.dtype):
        """`dtype`: compute dtype of the ranks."""
        self.dtype = dtype
        names = {key: name for name, key in own.keys}
        self.keys = {names.get(key, key): key for key in checkpoint.entries}
        """ComfyUI's name -> key in the file."""
        shapes = checkpoint.original_shapes
        self.tensors = {name: torch.empty(shapes[key], device="meta") for name, key in self.keys.items()}
        self._checkpoint = checkpoint
        self._shapes = {name: tensor.shape for name, tensor in self.tensors.items()}  # of the file
        modules = {name.rpartition(".")[0] for name in self.tensors}
        self._with_modules = {above for module in modules for above in _above(module)}

    def read_from(self, checkpoint: Checkpoint) -> None:
        """Take values from these files, which contain a model of the same kind."""
        self._checkpoint = checkpoint.smaller or checkpoint

    def sizes_with(self, patches: Mapping[str, list[Patch]]) -> TensorSizes:
        """Return the tensors that the patches enlarge, with their new sizes, for `Setup.enlarged`."""
        larger = {}
        for key, key_patches in patches.items():
            name, shape = self._find(key)
            if (after := shape_after(key_patches, shape)) != shape and self.is_patched(key):
                larger[self.keys[name]] = tuple(after)
        return tuple(sorted(larger.items()))

    def enlarged(self, sizes: TensorSizes) -> "NativeWeights":
        """The weights of a model in which these tensors are larger. Their values are the file's, followed by zeros."""
        weights = copy.copy(self)
        shapes = dict(sizes)
        weights.tensors = {
            name: torch.empty(shapes.get(self.keys[name], shape), device="meta") for name, shape in self._shapes.items()
        }
        return weights

    def check(self, key: str, patch: Patch, before: Sequence[Patch] = (), hooked: bool = False) -> bool:
        """Whether ComfyUI applies the patch after those `before` it. It leaves out one of another size, and only logs it.
        Raises ValueError for the user if `deltas` cannot express the patch. `hooked`: it is a conditioning's (a hook)."""
        name, shape = self._find(key)
        shape = shape_after(before, shape) if before else self.tensors[name].shape
        why = why_not(patch, shape)
        if why is None and hooked:
            why = why_not_hooked(patch, shape)
        if why is not None:
            what, instead = why
            raise ValueError(
                f"model: {what} (for {name}) cannot be added, because Parallel DiT's weights are on its ranks. {instead}"
            )
        checked = isinstance(patch[1], list) or _kind(patch[1]) == MODEL_AS_LORA
        return checked or _is_idle(patch) or is_applied(patch, name, shape)

    def deltas(self, patches: Mapping[str, list[Patch]], group: int = 0) -> Iterator[Delta]:
        """The Deltas of checked patches (a ModelPatcher's `patches`). `group`: 0, or the number of a conditioning's hook."""
        for key, key_patches in patches.items():
            name, shape = self._find(key)
            if not self.is_patched(key, hooked=group > 0):
                continue
            whole = any(map(depends_on_weight, key_patches)) or shape_after(key_patches, shape) != shape
            if group == 0 and whole:
                value = self.patched(key, key_patches)
                yield Delta(self.keys[name], value.to(self.dtype) if value.ndim == 2 else value, instead=True)
                continue
            for patch in key_patches:
                if patch[0] != 0.0:
                    yield self._delta(name, self.tensors[name].shape, patch, group)

    def patched(self, key: str, patches: list[Patch]) -> torch.Tensor:
        """Return the checkpoint's value with these patches, float32, computed by ComfyUI's functions."""
        name, _ = self._find(key)
        value = self.value(name)
        for patch in patches:
            value = calculated(patch, value, PREFIX + name)
        return value

    def is_patched(self, key: str, hooked: bool = False) -> bool:
        """Whether ComfyUI applies patches for this key. It ignores patches for tensors of a module that has submodules, such
        as Wan's `blocks.0.modulation` and SD3's table of positions, unless they are in a conditioning."""
        name, _ = self._find(key)
        return hooked or name.rpartition(".")[0] not in self._with_modules

    def stored(self, key: str) -> torch.Tensor | None:
        """Return the checkpoint's value as stored in the file, see stored_value."""
        return stored_value(self._checkpoint, self.key_in_file(key))

    def key_in_file(self, key: str) -> str:
        """Return the key in the file of the weight that ComfyUI calls `key`."""
        return self.keys[self._find(key)[0]]

    def _find(self, key: str) -> tuple[str, torch.Size]:
        """Return (name, shape in the file) of the weight that ComfyUI calls `key`."""
        name = key.removeprefix(PREFIX)
        if name not in self.tensors:
            raise ValueError(
                f"model: a patch for {key} cannot reach the ranks, because it is not a weight of the transformer."
            )
        return name, self._shapes[name]

    def value(self, name: str) -> torch.Tensor:
        """Return the checkpoint's value, float32."""
        key = self.keys[name]
        return values_of(self._checkpoint, [key])[key]

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
            return Delta(self.keys[name], up, down.flatten(1), scale, rows, group)
        # Applied to a weight of zeros, ComfyUI's functions give the sum that the patch adds.
        original = {name: [(self.value(name),)]} if _kind(value) == MODEL_AS_LORA else None
        patch = strength, value, strength_model, offset, function
        whole = calculated(patch, torch.zeros(shape), name, original_weights=original)
        return Delta(self.keys[name], whole, None, 1.0, rows, group)


def depends_on_weight(patch: Patch) -> bool:
    """Whether the change by a checked patch depends on the weight itself."""
    strength, value, strength_model, _, _ = patch
    if strength_model != 1.0 or isinstance(value, list):
        return True
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        turned = value.name not in DORA_SCALE or value.weights[DORA_SCALE[value.name]] is not None
        return strength != 0.0 and turned
    return _kind(value) == "set"


def why_not(patch: Patch, shape: torch.Size) -> tuple[str, str] | None:
    """Return why a weight of this shape cannot have the patch: (subject of a sentence, advice). None: it can."""
    strength, value, strength_model, offset, _ = patch
    if not (math.isfinite(strength) and math.isfinite(strength_model)):
        return f"something at the strength {strength if strength_model == 1.0 else strength_model}", "Use another strength."
    region = _region(shape, offset)
    if isinstance(value, list):
        if value[0][0].shape != region:
            other = f"a merge with a weight of shape {list(value[0][0].shape)} (this model: {list(region)})"
            return other, "Merge models of the same type and size."
        return next((why for patch in value[1:] if (why := why_not(patch, region)) is not None), None)
    if _is_idle(patch):
        return None
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        if value.name in DORA_SCALE and (alpha := value.weights[ALPHA]) is not None and not math.isfinite(alpha):
            return f"a {value.name.upper()} with the alpha {alpha}", "The LoRA file is damaged: use another one."
    elif (kind := _kind(value)) not in KINDS:
        return f"the patch kind '{kind}'", "Remove the node that adds it, or load the model with ComfyUI's own loader."
    elif kind == MODEL_AS_LORA and value[1][0].shape != region:
        other = f"a difference for a weight of shape {list(value[1][0].shape)} (this model: {list(region)})"
        return other, "Use models of the same type and size."
    return None


def why_not_hooked(patch: Patch, shape: torch.Size) -> tuple[str, str] | None:
    """Like `why_not`, for a patch in a conditioning, whose strength may differ from call to call."""
    kind = patch[1].name.upper() if isinstance(patch[1], comfy.weight_adapter.WeightAdapterBase) else "a whole weight"
    for_all = "It would be computed again at each call. Use a LoRA, LoHa or LoKr file, or load this one for the whole model."
    if shape_after([patch], shape) != shape:
        return f"{kind} that enlarges the weight in a conditioning (a hook)", "Load it for the whole model."
    if depends_on_weight(patch):
        return f"{kind} in a conditioning (a hook)", for_all
    return None


def _is_idle(patch: Patch) -> bool:
    """Whether a patch has strength 0, and so adds nothing. It may still scale the weight itself."""
    strength, value, *_ = patch
    return strength == 0.0 and not isinstance(value, list) and _kind(value) != "set"


def _above(module: str) -> Iterator[str]:
    """Names of the modules that contain a module, up to the model itself: ''."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _kind(value: Any) -> str:
    """Kind of a patch's value, such as "diff" or "set". '' for adapters and lists."""
    if not isinstance(value, tuple):
        return ""
    return "diff" if len(value) == 1 else value[0]


def _region(shape: torch.Size, offset: tuple[int, int, int] | None) -> torch.Size:
    """Return the shape of the part of a weight that an offset selects."""
    if offset is None:
        return shape
    dim, _, length = offset
    return torch.Size([length if axis == dim else size for axis, size in enumerate(shape)])


def _low_rank(value: Any, shape: torch.Size) -> bool:
    """Whether the factors can be sent instead of their product: only for a plain LoRA on a matrix."""
    if not isinstance(value, comfy.weight_adapter.LoRAAdapter) or value.weights[LORA_MID] is not None:
        return False
    return (len(value.weights[0]), value.weights[1].flatten(1).shape[1]) == shape
