"""Masks of noise by which a native class multiplies its outputs, as MiniMax H3's does in ComfyUI 0.34 and newer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel_backend.core.spans import Span
from parallel_backend.families.base.patching import Latents, Patching

HALF = 0.5


class _Ones:
    """In the place of the native model: its layers give ones."""

    def _forward(self, x: list[torch.Tensor], *_arguments: Any, **_named: Any) -> list[torch.Tensor]:
        return [torch.ones_like(latent) for latent in x]


@functools.cache
def multiplied(forward: Callable[..., Any], masks: tuple[str, ...], axes: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether the native class's `forward` multiplies each output by its mask. It is asked: it gets ones and masks of 0.5.

    `masks`: names of its arguments; `axes`: number of axes of each latent.
    """
    latents = [torch.ones((1,) * count) for count in axes]
    given = {name: torch.full_like(latent, HALF) for name, latent in zip(masks, latents, strict=True)}
    return tuple(bool((output == HALF).all()) for output in forward(_Ones(), latents, torch.ones(1), None, **given))


def masked(
    forward: Callable[..., Any],
    names: tuple[str, ...],
    outputs: Latents,
    call: Mapping[str, Any],
    band: tuple[Patching, Span] | None,
) -> Latents:
    """The outputs of the native class's layers, multiplied by the call's masks as its `forward` multiplies them.

    `names`: Inputs.output_masks, of the whole latents; `band`: how it was cut, and its rows.
    """
    if all(call.get(name) is None for name in names):
        return outputs
    does = multiplied(forward, names, tuple(output.ndim for output in outputs))
    masks = [call.get(name) if multiplies else None for name, multiplies in zip(names, does, strict=True)]
    if band is not None:
        masks = [mask if mask is None else _cut(index, mask, *band) for index, mask in enumerate(masks)]
    pairs = zip(outputs, masks, strict=True)
    return tuple(output if mask is None else output * mask.to(output.device) for output, mask in pairs)


def _cut(index: int, mask: torch.Tensor, patching: Patching, rows: Span) -> torch.Tensor:
    """The part of a latent's mask that is for the band: see Patching.band."""
    if index == 0:
        return patching.rows(mask, rows)
    assert patching.companion is not None
    return patching.companion.none_of(mask) if rows.start > 0 else mask
