"""ComfyUI's own class computes on a prompt's text before sampling, in this process, by its own method."""

from collections.abc import Mapping
from typing import Any

import comfy.lora
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import Reader, reading
from parallel_backend.families.own_class.building import build
from parallel_backend.families.own_class.family import OwnClassFamily

from ..lora.lora import PREFIX
from ..lora.patch_trial import Patch

TEXT_METHOD = "preprocess_text_embeds"
"""The class's method, which ComfyUI's BaseModel calls."""
KEPT = 4
"""Texts that are kept: positive and negative prompt of two sampling runs, with a LoRA and without, for instance."""


class OwnText:
    """Computes TEXT_METHOD. A layer's weights are read when it is called, so that those of blocks are not, and none is kept:
    they are large and prompts are few."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype):
        self._checkpoint, self._dtype = checkpoint, dtype
        self._results: list[tuple[Any, list[Any], torch.Tensor]] = []  # (name of the patches, what was given, result)

    def preprocess(
        self, patches: Mapping[str, list[Patch]], name: Any, text: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Text [B, T, C] of the text encoder -> text for the ranks, in the same dtype and on the same device.

        `patches`: a ModelPatcher's, some of them for these weights. `name` stands for the patches. `more`, `named`: what
        ComfyUI's BaseModel gives its own model beside the text.
        """
        given = [text, *more, *sorted(named.items())]
        for known_name, known, result in self._results:
            if known_name == name and _same(known, given):
                return result

        result = self._computed(patches, text, *more, **named)
        self._results = [(name, given, result), *self._results[: KEPT - 1]]
        return result

    def _computed(self, patches: Mapping[str, list[Patch]], text: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        family = self._checkpoint.family
        assert isinstance(family, OwnClassFamily)
        assert family.own is not None
        model = build(family.own, self._dtype)
        unread = {module: name for name, module in model.named_modules()}
        with reading(self._checkpoint) as reader:

            def read(module: torch.nn.Module, _arguments: Any) -> None:
                """With all layers in it: code may use a layer's weight without calling the layer."""
                for each in module.modules():
                    if each in unread:
                        self._read(reader, patches, text.device, each, unread.pop(each))

            self._read(reader, patches, text.device, model, unread.pop(model))
            for module in unread:
                module.register_forward_pre_hook(read)
            return getattr(model, TEXT_METHOD)(text, *more, **named)

    def _read(
        self,
        reader: Reader,
        patches: Mapping[str, list[Patch]],
        device: torch.device,
        module: torch.nn.Module,
        name: str,
    ) -> None:
        """Give the module the file's values, and put its tables on the device."""
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
    """A weight with the patches that there are for this key of the native model, in the weight's dtype."""
    of_key = patches.get(f"{PREFIX}{key}")
    return comfy.lora.calculate_weight(of_key, value.float(), key).to(value.dtype) if of_key else value


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal, tensors also in dtype and device."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other
