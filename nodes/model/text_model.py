"""What ComfyUI's BaseModel has a native model do with a prompt's text before sampling: here, of a family's TextModel."""

from collections.abc import Mapping
from typing import Any

import comfy.lora
import torch

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.checkpoints.reader import text_values

from .lora import PREFIX, Patch

KEPT = 4
"""Prompts whose text is kept: a positive and a negative one, of two sampling runs with a LoRA and without."""


class NativeText:
    """Answers `preprocess_text_embeds`. Weights are read for each prompt anew: they are large, and prompts few."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._kept: list[tuple[torch.Tensor, Any, torch.Tensor]] = []  # (text, what else it depends on, result)

    def preprocess(
        self, patches: Mapping[str, list[Patch]], name: Any, text: torch.Tensor, unprocessed: bool = False
    ) -> torch.Tensor:
        """Text [B, T, C] of the text encoder -> what the ranks get, in its dtype and on its device.

        `patches`: a ModelPatcher's, of which those for these weights are added to them. `name` stands for all of them.
        """
        given_with = name, unprocessed, text.dtype, text.device
        for given, known, result in self._kept:
            if known == given_with and torch.equal(given, text):
                return result

        def weights(prefix: str) -> dict[str, torch.Tensor]:
            values = text_values(self._checkpoint, prefix, text.dtype, text.device)
            for key, value in values.items():
                if added := patches.get(f"{PREFIX}{prefix}{key}"):
                    values[key] = comfy.lora.calculate_weight(added, value.float(), prefix + key).to(text.dtype)
            return values

        result = self._checkpoint.family.text_model.run(self._checkpoint.config, weights, text, unprocessed)
        self._kept = [(text, given_with, result), *self._kept[: KEPT - 1]]
        return result
