"""Wan's model and blocks in the form that ranks cut, with the frequency that RIFLEx replaces."""

import functools
from typing import Any

import torch
from torch import nn

from parallel_backend.families.parts.rope import FREQUENCY

from .ltx_forms import Indexed


@functools.cache
def wan_model(kind: type[nn.Module]) -> type[nn.Module]:
    """Takes FREQUENCY among its options, where KJNodes' RIFLEx puts another module for positions into the model."""

    class MayReplace(kind):  # type: ignore[valid-type, misc]
        def rope_encode(self, *sizes, transformer_options, **named):
            make = functools.partial(super().rope_encode, *sizes, transformer_options=transformer_options, **named)
            if FREQUENCY not in transformer_options:
                return make()
            replaced = functools.partial(with_frequency, *transformer_options[FREQUENCY])
            with self.rope_embedder.register_forward_hook(replaced):
                return make()

    return MayReplace


def with_frequency(
    number: float, radians: float, _module: nn.Module, given: tuple[Any, ...], turns: torch.Tensor
) -> torch.Tensor:
    """Rotations [B, 1, S, D / 2, 2, 2] of tokens at `given` positions [B, S, 3], but for this one of the frames' axis."""
    angles = given[0][..., 0].float() * radians
    turn = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), dim=-1).unflatten(-1, (2, 2))
    turns = turns.clone()
    turns[:, 0, :, int(number)] = turn.to(turns)
    return turns


@functools.cache
def wan_block(kind: type[nn.Module]) -> type[nn.Module]:
    """Times of frames [B, F, 6, D] become Indexed. The rotary table has a row for each token of the whole in all blocks."""

    class ByIndex(kind):  # type: ignore[valid-type, misc]
        def __call__(self, x, e, freqs, **named):
            if (frames := e.shape[1]) > 1:
                tokens = freqs.shape[1]
                e = Indexed(e, torch.arange(tokens, device=e.device) // -(-tokens // frames), tokens)
            return super().__call__(x, e=e, freqs=freqs, **named)

        def forward(self, x, e, **named):
            if isinstance(e, Indexed):
                e = e.data_BFD if x.shape[1] == e.tokens else e.data_BFD[:, e.index_S]
            return super().forward(x, e=e, **named)

    return ByIndex
