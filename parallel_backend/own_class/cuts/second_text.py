"""Normalized attention guidance as in KJNodes' WanVideoNAG: attention to the prompt is moved away from a second text.

The class's blocks attend to the prompt in a module of their own.

The module runs twice: first with the second text and a single token of the latent, to get its keys and values of that text.
Then it runs with the call's own arguments, and each call of attention also attends to those keys, and guides.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import Attend, attention_by
from parallel_backend.own_class.cuts.forwards import put_forwards
from parallel_backend.own_class.cuts.guided_attention import Sum, normalized

SECOND = "parallel_dit_second_text"
"""Argument of a call, which the class does not get: {TEXT: [B, U, C] as the class gets its own text, or embedded; SETTINGS:
[B, 3], scale, tau and alpha, which is 0 for entries that are not guided}."""
TEXT, SETTINGS = "text", "settings"
LAYERS = "text_embedding"
"""Name of the model's layers that embed text, as the node has it."""
PROMPT_ATTENTION = re.compile(r"blocks\.\d+\.cross_attn")
"""Names of the modules in blocks, as the node has them."""


@dataclass
class _Given:
    """Values of the present call."""

    text: torch.Tensor
    """[B, U, hidden], embedded."""
    words: int
    """Number of tokens of the class's own text."""
    settings: tuple[torch.Tensor, ...]
    add_up: Sum
    attend: Attend
    """Computes the class's own calls of attention."""
    attend_whole: Attend
    """Computes attention to keys that every rank has all of."""


def prompt_attention(model: nn.Module) -> list[nn.Module]:
    """The modules in blocks that attend to the prompt."""
    return [module for name, module in model.named_modules() if PROMPT_ATTENTION.fullmatch(name)]


class SecondText:
    """Puts itself into the modules for good, as compiled blocks need, and leaves a call without a second text as it is."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._given: _Given | None = None
        self._undo: ExitStack | None = None

    @contextmanager
    def of_call(
        self, given: Mapping[str, Any], own: torch.Tensor, add_up: Sum, attend: Attend, attend_whole: Attend
    ) -> Iterator[None]:
        """Context of a call with a second text `given`, see SECOND. `own`: the class's text [B, T, C]."""
        if self._undo is None:
            modules = prompt_attention(self._model)
            self._undo = put_forwards((each, functools.partial(self._attend_to_prompt, each.forward)) for each in modules)
        text = given[TEXT].to(own.dtype)
        text = self._model.get_submodule(LAYERS)(text) if text.shape[-1] == own.shape[-1] else text
        settings = tuple(each.to(own.dtype) for each in given[SETTINGS][:, :, None, None, None].unbind(1))
        self._given = _Given(text, own.shape[1], settings, add_up, attend, attend_whole)
        try:
            yield
        finally:
            self._given = None

    def close(self) -> None:
        """Make the model again what it was."""
        if self._undo is not None:
            self._undo.close()
        self._undo = None

    @torch.compiler.disable  # ranks add up in it
    def _attend_to_prompt(
        self, forward: Callable[..., torch.Tensor], x: torch.Tensor, text: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """In place of a module's forward: guided attention [B, s, hidden] of the latent `x` to the class's `text`, which may
        have other tokens before it."""
        if (given := self._given) is None:
            return forward(x, text, *more, **named)
        noted: list[tuple[torch.Tensor, torch.Tensor]] = []

        def note(function: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            noted.append((k, v))
            return function(q, k, v, *args, **kwargs)

        second = torch.cat((text[:, : text.shape[1] - given.words], given.text), dim=1)
        with attention_by(note):
            forward(x[:, :1], second, *more, **named)
        with attention_by(functools.partial(_attend, given, iter(noted))):
            return forward(x, text, *more, **named)


def _attend(
    given: _Given,
    noted: Iterator[tuple[torch.Tensor, torch.Tensor]],
    function: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """[B, s, C] of a call of attention, guided. Keys that are the same for both texts change nothing."""
    out = given.attend(function, q, k, v, *args, **kwargs)
    if out.ndim != 3 or kwargs.get("mask") is not None:
        raise Unproven("its attention to the prompt is not a call over [B, S, C] without a mask")
    away = given.attend_whole(function, q, *next(noted), *args, **kwargs)
    scale, tau, alpha = given.settings
    return normalized(out[:, :, None], away[:, :, None], scale, tau, alpha, given.add_up)[:, :, 0].type_as(out)
