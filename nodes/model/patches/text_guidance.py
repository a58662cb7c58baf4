"""Normalized attention guidance (NAG) in a model's cross-attention, as KJNodes' WanVideoNAG puts it on a MODEL.

The node replaces the `forward` of each block's cross-attention with a function with a second text in its closure. Text and
settings become conditioning for the ranks.
"""

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parallel_backend.own_class.trials.change_trial import SETTINGS

from ...ui.other_nodes import is_known
from ..native.native_names import NativeNames

GUIDANCE_KEY = "parallel_dit_text_guidance"
"""Key in `transformer_options` under which a MODEL carries its TextGuidance."""
CROSS_ATTENTION = re.compile(r"diffusion_model\.blocks\.\d+\.cross_attn\.forward")
GUIDED = re.compile(r"model_optimization_nodes\.WanCrossAttentionPatch\.__get__\.<locals>\.wrapped_attention")


class TextLayers(NativeNames):
    """The native model's layers that embed the text. Here they return the text unchanged, because ranks embed it."""

    def to(self, *_arguments: Any, **_named: Any) -> "TextLayers":
        return self

    def __call__(self, text: torch.Tensor) -> torch.Tensor:
        return text


@dataclass(frozen=True, eq=False)
class TextGuidance:
    """The widgets of WanVideoNAG, and its `text` [1, T, C]."""

    text: torch.Tensor
    scale: float
    tau: float
    alpha: float
    guides_all: bool
    """Whether all of a call's entries are guided, or only the first half of them (the positive prompt's)."""
    attends_to_picture: bool
    """Whether the model's cross-attention also attends to CLIP's image: then only a call with two entries has halves."""
    node: Any = None
    """The node's object that creates the functions."""
    function: Any = None
    """One of these functions."""
    _by_entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextGuidance":
        return self

    def of(self, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Text [entries, T, C], and settings [entries, 3]: scale, tau and alpha. Entries without guidance have alpha 0.

        Calls with equally many entries get the same tensors: the client then sends them once, without comparing their
        values.
        """
        if entries not in self._by_entries:
            self._by_entries[entries] = self.text.expand(entries, -1, -1).contiguous(), self.settings(entries)
        return self._by_entries[entries]

    def settings(self, entries: int) -> torch.Tensor:
        """Settings [entries, 3], see `of`."""
        has_halves = entries == 2 or (entries > 2 and not self.attends_to_picture)
        all_guided = (self.guides_all and not self.attends_to_picture) or not has_halves
        settings = torch.tensor([(self.scale, self.tau, self.alpha)] * entries, dtype=torch.float32)
        settings[entries if all_guided else -(-entries // 2) :, 2] = 0.0
        return settings


def tried_guidance(guidance: TextGuidance) -> TextGuidance:
    """Return `guidance` with the settings of a trial: each of them has an effect there."""
    scale, tau, alpha = SETTINGS
    return replace(guidance, scale=scale, tau=tau, alpha=alpha)


def forward_of_node(guidance: TextGuidance, module: torch.nn.Module, text: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the node's `forward` of a native cross-attention, with these settings and an embedded `text` [1, T, hidden]."""
    node = copy.copy(guidance.node)
    node.nag_context, node.nag_scale, node.nag_tau, node.nag_alpha = text, guidance.scale, guidance.tau, guidance.alpha
    return node.__get__(module, type(module))


def text_guidance(name: str, patch: Any) -> TextGuidance | None:
    """Return the TextGuidance that an object patch of this name puts on the MODEL. None: it is another patch."""
    function = getattr(patch, "__func__", patch)
    if CROSS_ATTENTION.fullmatch(name) is None or not is_known(GUIDED, function):
        return None
    node = inspect.getclosurevars(function).nonlocals["self"]
    scale, tau, alpha = float(node.nag_scale), float(node.nag_tau), float(node.nag_alpha)
    return TextGuidance(node.nag_context, scale, tau, alpha, node.input_type == "batch", bool(node.i2v), node, function)
