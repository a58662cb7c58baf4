"""Normalized attention guidance (NAG) on ranks, in the two ways in which ComfyUI's nodes do it.

ComfyUI's NAGuidance: the class passes the output of some attention calls to other nodes' functions, and says which tokens
are the image's. A rank passes a function that guides its own tokens and heads.

KJNodes' WanVideoNAG: the class's blocks attend to the prompt in a module of their own. The module runs twice: first with the
second text and one token of the latent, to get the keys and values of that text. Then it runs with the call's own arguments;
each attention call also attends to those keys, and its output is guided."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel_backend.core.block_changes import NormalizedGuidance
from parallel_backend.core.spans import Span
from parallel_backend.own_class.calls.residuals import PATCHES
from parallel_backend.own_class.calls.unproven import Unproven
from parallel_backend.own_class.cuts.attention_calls import Attend, attention_by
from parallel_backend.own_class.cuts.forwards import put_forwards
from parallel_backend.own_class.cuts.token_cut import TokenCut

LEAST_NORM = 1e-6


def normalized(
    positive: torch.Tensor,
    negative: torch.Tensor,
    scale: float | torch.Tensor,
    tau: float | torch.Tensor,
    alpha: float | torch.Tensor,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> torch.Tensor:
    """The output [b, n, H, D], guided by that of the second prompt, as in ComfyUI's NAGuidance (comfy_extras/nodes_nag.py).
    `scale`, `tau`, `alpha`: see NormalizedGuidance; numbers, or [b, 1, 1, 1]. `add_up`: sums over ranks with other heads."""
    away = positive * scale - negative * (scale - 1)
    sums = [each.abs().sum(dim=(2, 3), keepdim=True, dtype=torch.float32) for each in (positive, away)]
    before, after = add_up(torch.stack(sums)).clamp_min(LEAST_NORM)
    ratio = after / before
    factor = (ratio.clamp(max=tau) / ratio).to(away.dtype)
    return away * factor * alpha + positive * (1 - alpha)


GUIDED = "parallel_dit_guided"
"""Entry of transformer_options on ranks and in trials: a NormalizedGuidance."""
OUTPUT = "attn1_output_patch"
"""ComfyUI's kind of patch that gets the output of attention."""
IMAGE = "img_slice"
"""Entry in the options that such a patch gets: (first image token, token after the last one)."""
Sum = Callable[[torch.Tensor], torch.Tensor]
"""Sums tensors over the ranks that have other heads."""


def own_sums(sums: torch.Tensor) -> torch.Tensor:
    """Return the Sum of a rank that has all heads."""
    return sums


class Guide:
    """The attention patch that guides. A stage has one for all calls, because compiled blocks need the same object."""

    def __init__(self, guidance: NormalizedGuidance | None = None):
        self._guidance = guidance
        self._add_up: Sum = own_sums
        self._tokens: TokenCut | None = None

    def options(self, options: Mapping[str, Any], tokens: TokenCut | None, add_up: Sum) -> dict[str, Any]:
        """The class's transformer_options: `options` without GUIDED, and with this patch. `tokens`: the present cut."""
        self._guidance, self._tokens, self._add_up = options[GUIDED], tokens, add_up
        others = {name: value for name, value in options.items() if name != GUIDED}
        return others | {PATCHES: options.get(PATCHES, {}) | {OUTPUT: [self]}}

    @torch.compiler.disable  # ranks add up in it
    def __call__(self, out_BSC: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Guide the image's tokens of both prompts in place. If the class does not say which tokens are the image's, guide
        all tokens of the positive prompt, as ComfyUI's node does."""
        guidance, add_up = self._guidance, self._add_up
        assert guidance is not None, "the class calls it within a call that is guided"
        positive, negative = guidance.positive.slice, guidance.negative.slice
        if out_BSC.ndim != 3 or len(out_BSC) < max(guidance.positive.stop, guidance.negative.stop):
            raise Unproven("its guided attention does not return [B, S, C]")
        image = options.get(IMAGE)
        rows, mask_s1 = (slice(None), None) if image is None else self._rows(Span(*image), out_BSC)
        both = [out_BSC[entries, rows] for entries in (positive, negative)]
        settings = guidance.scale, guidance.tau, guidance.alpha
        guided = normalized(both[0][:, :, None], both[1][:, :, None], *settings, add_up)[:, :, 0]
        for entries, own in zip((positive, negative)[: 1 if image is None else 2], both, strict=False):
            out_BSC[entries, rows] = guided if mask_s1 is None else torch.where(mask_s1, guided, own)
        return out_BSC

    def _rows(self, image: Span, out_BSC: torch.Tensor) -> tuple[slice, torch.Tensor | None]:
        """Return (rows of `out_BSC` with all of the rank's image tokens, [s, 1] bool: which are image tokens). None: all of
        them."""
        mask = None if self._tokens is None else self._tokens.which_own(image, out_BSC.shape[1], out_BSC.device)
        return (image.slice, None) if mask is None else (slice(None), mask[:, None])


SECOND = "parallel_dit_second_text"
"""Name of an argument of a call that ranks do not pass to the class. Its value: {TEXT: [B, U, C], as the class gets its own
text or embedded; SETTINGS: [B, 3], scale, tau and alpha}. Entries that are not guided have alpha 0."""
TEXT, SETTINGS = "text", "settings"
LAYERS = "text_embedding"
"""Name of the model's layers that embed text, as in the node's own code."""
PROMPT_ATTENTION = re.compile(r"blocks\.\d+\.cross_attn")
"""Names of the blocks' modules that attend to the prompt, as in the node's own code."""


@dataclass
class _Given:
    """Values of the present call with a second text."""

    text: torch.Tensor
    """The second text [B, U, hidden], embedded."""
    words: int
    """Number of tokens of the class's own text."""
    settings: tuple[torch.Tensor, ...]
    add_up: Sum
    attend: Attend
    """Computes the class's own calls of attention."""
    attend_whole: Attend
    """Computes attention to keys that are complete on every rank."""


def prompt_attention(model: nn.Module) -> list[nn.Module]:
    """Return the blocks' modules that attend to the prompt."""
    return [module for name, module in model.named_modules() if PROMPT_ATTENTION.fullmatch(name)]


class SecondText:
    """Guides attention to the prompt with a second text. Calls without a second text are unchanged. It replaces forwards of
    modules from the first such call until `close`, because compiled blocks must not change."""

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
        """Restore the modules' forwards."""
        if self._undo is not None:
            self._undo.close()
        self._undo = None

    @torch.compiler.disable  # ranks add up in it
    def _attend_to_prompt(
        self, forward: Callable[..., torch.Tensor], x: torch.Tensor, text: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Replaces a module's forward: guided attention [B, s, hidden] of the latent `x` to the class's `text`, which may
        have other tokens in front."""
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
    """Guided output [B, s, C] of one attention call. If both texts have the same keys here, guidance changes nothing."""
    out = given.attend(function, q, k, v, *args, **kwargs)
    if out.ndim != 3 or kwargs.get("mask") is not None:
        raise Unproven("its attention to the prompt is not a call over [B, S, C] without a mask")
    away = given.attend_whole(function, q, *next(noted), *args, **kwargs)
    scale, tau, alpha = given.settings
    return normalized(out[:, :, None], away[:, :, None], scale, tau, alpha, given.add_up)[:, :, 0].type_as(out)
