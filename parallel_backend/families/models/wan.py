"""Wan's transformer with places for what its variants add: streams and tokens of their own, and work behind a block.

Parts are diffusers'. A variant replaces `patch_embedding`, `blocks` or both. Several streams of one token are its channels,
one behind the other, so that all of them go wherever the token goes.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.configuration_utils import register_to_config


class WanVariant(WanTransformer3DModel):
    """As diffusers' class but for the arguments of `patch_embedding` and of the blocks."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        embedded: dict[str, Any] | None = None,
        given: dict[str, Any] | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """[b, C, T, H, W] in whole patches, timestep [b] or [b, n], text [b, t, text_dim] -> [b, out_channels, T, H, W].

        `embedded`: arguments of `patch_embedding`, behind the latent. `given`: those of `block_arguments`.
        """
        assert not return_dict
        batch, _, *sizes = hidden_states.shape
        rotary_emb, given = self.rope(hidden_states), self.block_arguments(hidden_states, timestep, **(given or {}))
        hidden_states = self.patch_embedding(hidden_states, **(embedded or {}))
        tokens = timestep.shape[1] if timestep.ndim == 2 else None
        temb, modulation, text, picture = self.condition_embedder(
            timestep.flatten(), encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len=tokens
        )
        modulation = modulation.unflatten(-1, (6, -1))
        if picture is not None:
            text = torch.cat((picture, text), dim=1)
        for block in self.blocks:
            hidden_states = block(hidden_states, text, modulation, rotary_emb, **given)
        table = self.scale_shift_table if tokens is None else self.scale_shift_table[None]
        shift, scale = (table + temb.unsqueeze(-2)).unbind(-2)
        if tokens is None:
            shift, scale = shift[:, None], scale[:, None]
        hidden_states = hidden_states[..., : temb.shape[-1]]
        hidden_states = self.proj_out((self.norm_out(hidden_states.float()) * (1 + scale) + shift).type_as(hidden_states))
        frames, rows, columns = (size // side for size, side in zip(sizes, self.config.patch_size, strict=True))
        out = hidden_states.view(batch, frames, rows, columns, *self.config.patch_size, -1)
        return (out.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, *sizes),)

    def block_arguments(self, hidden_states: torch.Tensor, timestep: torch.Tensor, **given: Any) -> dict[str, Any]:
        """What the blocks are given behind the arguments that all of Wan's have. `hidden_states`: the latent."""
        return given


def tokens(patches: torch.Tensor) -> torch.Tensor:
    """[b, C, T, H, W] of a patch embedding -> tokens [b, T H W, C]."""
    return patches.flatten(2).transpose(1, 2)


def register_variant(init: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a variant's constructor `init(self, *, own arguments, **wan)`: register_to_config, for which Wan's
    arguments are its own too."""
    own = inspect.signature(init).parameters.values()
    wan = inspect.signature(WanTransformer3DModel.__init__).parameters.values()
    init.__signature__ = inspect.Signature([*wan, *(each for each in own if each.kind is each.KEYWORD_ONLY)])
    return register_to_config(init)
