"""The base class of Wan Animate and Wan Animate 2, which add further streams or parts of a block.

Layers are diffusers'. A variant replaces `patch_embedding` and `blocks`. Further streams of a token are further
channels of it, so that every cut of the sequence moves them with the token.
"""

from typing import Any

import torch
from diffusers.models.transformers import transformer_wan as original
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import nn

from parallel_backend.core.device_copies import to_device

from . import fused
from .constructors import extends
from .wan_text import Texts

register_variant = extends(original.WanTransformer3DModel)
"""Decorator of a variant's constructor."""


class WanVariant(original.WanTransformer3DModel):
    """diffusers' class with further arguments of `patch_embedding` and the blocks."""

    patch_embedding: Any  # variants embed further videos

    @register_variant
    def __init__(self, **wan: Any):
        super().__init__(**wan)
        self.rope = Rope(self.config["attention_head_dim"], self.config["patch_size"], self.config["rope_max_seq_len"])

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.config["num_attention_heads"] * self.config["attention_head_dim"]

    @property
    def block_settings(self) -> tuple[Any, ...]:
        """Arguments of the constructor of diffusers' block."""
        config = self.config
        further = (config["qk_norm"], config["cross_attn_norm"], config["eps"], config["added_kv_proj_dim"])
        return self.width, config["ffn_dim"], config["num_attention_heads"], *further

    def patches(self, channels: int) -> nn.Conv3d:
        """A patch embedding [b, channels, T, H, W] -> [b, width, frames, rows, columns]."""
        patch = self.config["patch_size"]
        return nn.Conv3d(channels, self.width, kernel_size=patch, stride=patch)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        patch_inputs: dict[str, Any] | None = None,
        block_inputs: dict[str, Any] | None = None,
        rope: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """[b, C, T, H, W] in whole patches, timestep [b], text [b, t, text_dim] -> [b, out_channels, T, H, W].

        `patch_inputs`: further arguments of `patch_embedding`. `block_inputs`: arguments of `block_arguments`. `rope`: ROPE
        and ROPE_FREQUENCY (families/base/step_inputs.py).
        """
        assert not return_dict
        batch, _, *sizes = hidden_states.shape
        frames, rows, columns = (size // side for size, side in zip(sizes, self.config["patch_size"], strict=True))
        rotary_emb = self.rope(hidden_states, *rope)
        block_arguments = self.block_arguments(hidden_states, timestep, **(block_inputs or {}))
        hidden_states = self.patch_embedding(hidden_states, **(patch_inputs or {}))
        temb, modulation, text, picture = self.condition_embedder(
            timestep, encoder_hidden_states, encoder_hidden_states_image
        )
        modulation, text = modulation.unflatten(-1, (6, -1)), texts(text, picture)
        for block in self.blocks:
            hidden_states = block(hidden_states, text, modulation, rotary_emb, **block_arguments)
        hidden_states = hidden_states[:, :, : temb.shape[-1]]
        shift, scale = (self.scale_shift_table + temb[:, None])[:, :, None].unbind(1)
        hidden_states = self.proj_out(fused.modulated(self.norm_out, hidden_states, scale, shift))
        out = hidden_states.view(batch, frames, rows, columns, *self.config["patch_size"], -1)
        return (out.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, *sizes),)

    def block_arguments(self, hidden_states: torch.Tensor, timestep: torch.Tensor, **block_inputs: Any) -> dict[str, Any]:
        """Arguments of the blocks in addition to those that both blocks have. `hidden_states`: the latent."""
        return block_inputs


def texts(text: torch.Tensor, picture: torch.Tensor | None) -> Texts:
    """Embedded text [b, t, width] and picture [b, p, width], as blocks take them.

    Without a picture the text stands there twice, for it and for itself.
    """
    if picture is None:
        picture, text = text.chunk(2, dim=1)
    return Texts(text, picture)


class Rope(WanRotaryPosEmbed):
    """Rotation of the video's tokens."""

    def forward(
        self, hidden_states: torch.Tensor, scaled: torch.Tensor | None = None, frequency: torch.Tensor | None = None
    ) -> fused.Rotation:
        """Latent [b, C, T, H, W] -> rotation of n tokens. `scaled`, `frequency`: argument `rope` of WanVariant, the same for
        all entries."""
        if scaled is None and frequency is None:
            return fused.rotation_of_tables(super().forward(hidden_states))
        sizes, device = zip(hidden_states.shape[2:], self.patch_size, strict=True), hidden_states.device
        grid = torch.cartesian_prod(*(torch.arange(float(size // side)) for size, side in sizes))
        positions = to_device(grid, device)
        positions = positions if scaled is None else positions * scaled[0, 0] + scaled[0, 1]
        frames, *sides = (_frequencies(width, device) for width in (self.t_dim, self.h_dim, self.w_dim))
        if frequency is not None:
            number = torch.arange(len(frames), device=device)
            frames = torch.where(number == frequency[0, 0], frequency[0, 1], frames)
        axes = zip(positions.split(1, -1), (frames, *sides), strict=True)
        angles = torch.cat([axis * frequencies for axis, frequencies in axes], dim=-1)
        return fused.rotation(angles.cos()[None, :, None], angles.sin()[None, :, None])


def _frequencies(width: int, device: torch.device) -> torch.Tensor:
    """[width / 2]: radians for each position."""
    return 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)


def tokens(patches: torch.Tensor) -> torch.Tensor:
    """[b, C, T, H, W] of a patch embedding -> tokens [b, T H W, C]."""
    return patches.flatten(2).transpose(1, 2)
