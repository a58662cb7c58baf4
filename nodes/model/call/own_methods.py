"""Computes methods of ComfyUI's own class in this process, with the file's weights. No rank has these weights."""

from collections.abc import Mapping
from typing import Any

import comfy.lora
import torch
from torch.utils import _pytree as pytree

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import Reader, reading
from parallel_backend.own_class.built.building import build

from ..lora.lora import PREFIX
from ..lora.patch_trial import Patch

TEXT_METHOD = "preprocess_text_embeds"
"""The class's method for a prompt's text. ComfyUI's BaseModel calls it before sampling."""
KEPT = 4
"""Number of stored results, such as those of the positive and negative prompt of two sampling runs with different LoRAs."""


class OwnMethods:
    """Computes methods. A layer's weights are read when it is called, so those of blocks are never read. None is kept,
    because they are large, and calls with new values are rare."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self._checkpoint, self._dtype = checkpoint, dtype
        self._results: list[tuple[Any, list[Any], torch.Tensor]] = []  # (of what and where, what was given, result)

    def computed(
        self, method: str, patches: Mapping[str, list[Patch]], name: Any, first: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Return the result of the method, on the device of `first`, such as text [B, T, C] of the text encoder.

        `patches`: a ModelPatcher's; some may be for these weights. `name`: stands for the patches. `first`, `more`, `named`:
        the method's arguments. Copies of them are stored in host memory, because a video of faces is large.
        """
        given = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, [first, *more, *sorted(named.items())])
        of_what = method, name, first.device
        for known_of, known, result in self._results:
            if known_of == of_what and _same(known, given):
                return result

        result = self._compute(method, patches, first, *more, **named)
        self._results = [(of_what, given, result), *self._results[: KEPT - 1]]
        return result

    def _compute(
        self, method: str, patches: Mapping[str, list[Patch]], first: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        model = build(self._checkpoint.built.own, self._dtype)
        unread = {module: name for name, module in model.named_modules()}
        with reading(self._checkpoint) as reader:

            def read(module: torch.nn.Module, _arguments: Any) -> None:
                """Pre-forward hook: reads the module's weights and those of all layers in it, which its code may use without
                calling them."""
                for each in module.modules():
                    if each in unread:
                        self._read(reader, patches, first.device, each, unread.pop(each))

            self._read(reader, patches, first.device, model, unread.pop(model))
            for module in unread:
                module.register_forward_pre_hook(read)
            return getattr(model, method)(first, *more, **named)

    def _read(
        self,
        reader: Reader,
        patches: Mapping[str, list[Patch]],
        device: torch.device,
        module: torch.nn.Module,
        name: str,
    ) -> None:
        """Give the module the file's values, and move its buffers to the device."""
        values = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for leaf, value in values.items():
            key = f"{name}.{leaf}".strip(".")
            if key in self._checkpoint.key_map:
                value = patched(reader.values(key, value.dtype, None, device), patches, key)
            if leaf in module._parameters:
                module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value.to(device)


def patched(value: torch.Tensor, patches: Mapping[str, list[Patch]], key: str) -> torch.Tensor:
    """Return a weight with the patches for this key of the native model, in the weight's dtype."""
    of_key = patches.get(f"{PREFIX}{key}")
    return comfy.lora.calculate_weight(of_key, value.float(), key).to(value.dtype) if of_key else value


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal, tensors also in dtype. All tensors are in host memory."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other
