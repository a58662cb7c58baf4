"""Normalized attention guidance of a model's look at the text, as KJNodes' WanVideoNAG puts it on a MODEL.

It puts another `forward` into each block's cross-attention, with a second text in its closure. That text and the settings
become conditioning for the ranks.
"""

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_backend.families import Family
from parallel_backend.families.parts.wan import TEXT_GUIDANCE

from .block_patches import is_known
from .native_names import NativeNames

GUIDANCE_KEY = "parallel_dit_text_guidance"
"""Key in `transformer_options` under which a MODEL carries its TextGuidance."""
LAYERS = "text_embedding"
"""Attribute of the native model that embeds the text."""
CROSS_ATTENTION = re.compile(r"diffusion_model\.blocks\.\d+\.cross_attn\.forward")
GUIDED = re.compile(r"model_optimization_nodes\.WanCrossAttentionPatch\.__get__\.<locals>\.wrapped_attention")


class TextLayers(NativeNames):
    """The native model's layers that embed the text. They give it out as it is: the ranks embed it."""

    def to(self, *_arguments: Any, **_named: Any) -> "TextLayers":
        return self

    def __call__(self, text: torch.Tensor) -> torch.Tensor:
        return text


@dataclass(frozen=True, eq=False)
class TextGuidance:
    """The widgets of WanVideoNAG, and its `text` [1, T, C]. Of a call's entries the first half is guided, or with `all_of`
    all are."""

    text: torch.Tensor
    scale: float
    tau: float
    alpha: float
    all_of: bool
    looks_at_picture: bool
    """The model's cross-attention looks at CLIP's picture too: then two entries alone count as halves."""
    _made: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextGuidance":
        return self

    def of(self, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For a call of so many entries: the text of each, and [entries, 3] scale, tau and alpha, 0 for those left alone.

        Calls of one size get the same tensors, which the client knows without a look at their values.
        """
        if entries not in self._made:
            halves = entries == 2 or (entries > 2 and not self.looks_at_picture)
            guided = entries if (self.all_of and not self.looks_at_picture) or not halves else -(-entries // 2)
            settings = torch.tensor([(self.scale, self.tau, self.alpha)] * entries, dtype=torch.float32)
            settings[guided:, 2] = 0.0
            self._made[entries] = self.text.expand(entries, -1, -1).contiguous(), settings
        return self._made[entries]


def text_guidance(family: Family, name: str, patch: Any) -> TextGuidance | None:
    """What an object patch of this name stands for. None: something else, or the family does not read it."""
    function = getattr(patch, "__func__", patch)
    if (
        TEXT_GUIDANCE not in family.inputs.options
        or CROSS_ATTENTION.fullmatch(name) is None
        or not is_known(GUIDED, function)
    ):
        return None
    node = inspect.getclosurevars(function).nonlocals["self"]
    settings = (float(value) for value in (node.nag_scale, node.nag_tau, node.nag_alpha))
    return TextGuidance(node.nag_context, *settings, node.input_type == "batch", bool(node.i2v))
