"""The native model's part that ComfyUI's BaseModel runs on a prompt's text before sampling, as a family's TextModel."""

from collections.abc import Mapping
from typing import Any

import comfy.lora
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import text_values

from .lora import PREFIX
from .patch_trial import Patch

TEXT_METHOD = "preprocess_text_embeds"
"""The native model's method."""
KEPT = 4
"""Texts that are kept: positive and negative prompt of two sampling runs, with a LoRA and without, for instance."""


class NativeText:
    """Computes `preprocess_text_embeds`. Weights are read for each prompt, because they are large and prompts are few."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
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
        def weights(prefix: str) -> dict[str, torch.Tensor]:
            values = text_values(self._checkpoint, prefix, text.dtype, text.device)
            return {key: patched(value, patches, prefix + key) for key, value in values.items()}

        text_model = self._checkpoint.family.text_model
        assert text_model is not None  # other families' models have no `preprocess_text_embeds`
        return text_model.run(self._checkpoint.config, weights, text, *more, **named)


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
