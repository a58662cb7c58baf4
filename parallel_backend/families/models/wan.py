"""Wan's transformer, and the base class of its variants, which add reference tokens, further streams or parts of a block.

Layers are diffusers'. A variant replaces `patch_embedding`, `blocks` or both. Further streams of a token are further
channels of it, so that every cut of the sequence moves them with the token. Reference tokens follow the video's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_wan as original
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import nn

from parallel_backend.core.device_copies import to_device

from . import fused
from .constructors import extends
from .wan_block import Block, RotaryProcessor
from .wan_text import TextProcessor, Texts

register_variant = extends(original.WanTransformer3DModel)
"""Decorator of a variant's constructor."""


class WanVariant(original.WanTransformer3DModel):
    """diffusers' class with positions of reference tokens and further arguments of `patch_embedding` and the blocks."""

    patch_embedding: Any  # variants embed further videos

    @register_variant
    def __init__(self, **wan: Any):
        super().__init__(**wan)
        self.rope = Rope(self.config["attention_head_dim"], self.config["patch_size"], self.config["rope_max_seq_len"])
        for block in self.blocks:
            block.__class__ = Block
            block.attn1.processor, block.attn2.processor = RotaryProcessor(), TextProcessor()

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
        positions: torch.Tensor | None = None,
        patch_inputs: dict[str, Any] | None = None,
        block_inputs: dict[str, Any] | None = None,
        away: torch.Tensor | None = None,
        normalized: torch.Tensor | None = None,
        rope: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """[b, C, T, H, W] in whole patches, timestep [b] or [b, n], text [b, t, text_dim] -> [b, out_channels, T, H, W].

        `positions` [b, R, 4] float32: frame, row, column and number of the source of R reference tokens. `patch_inputs`:
        further arguments of `patch_embedding`. `block_inputs`: arguments of `block_arguments`. `away` [b, u, text_dim] (or
        embedded, [b, u, width]), `normalized` [b, 3]: the second text of a Texts, and its settings. `rope`: ROPE and
        ROPE_FREQUENCY (families/base/step_inputs.py).
        """
        assert not return_dict
        batch, _, *sizes = hidden_states.shape
        frames, rows, columns = (size // side for size, side in zip(sizes, self.config["patch_size"], strict=True))
        rotary_emb = self.rope(hidden_states, positions, *rope)
        block_arguments = self.block_arguments(hidden_states, timestep, **(block_inputs or {}))
        hidden_states = self.patch_embedding(hidden_states, **(patch_inputs or {}))
        times = timestep.shape[1] if timestep.ndim == 2 else None
        if away is not None and away.shape[-1] == self.config["text_dim"]:
            # First: the module cache tells a module's outputs apart by the order of its calls in a micro-step, and a cached
            # `condition_embedder` does not call this module.
            away = self.condition_embedder.text_embedder(away)
        temb, modulation, text, picture = self.condition_embedder(
            timestep.flatten(), encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len=times
        )
        modulation = modulation.unflatten(-1, (6, -1))
        text = texts(text, picture, self.config["added_kv_proj_dim"] is not None)
        if away is not None and normalized is not None:
            text = (text if isinstance(text, Texts) else Texts(text))._replace(away=away, settings=normalized)
        for block in self.blocks:
            hidden_states = block(hidden_states, text, modulation, rotary_emb, **block_arguments)
        hidden_states = hidden_states[:, : frames * rows * columns, : temb.shape[-1]]
        table = self.scale_shift_table if times is None else self.scale_shift_table[None]
        shift, scale = (table + temb.unsqueeze(-2)).unbind(-2)
        if times is None:
            shift, scale = shift[:, None], scale[:, None]
        hidden_states = self.proj_out(fused.modulated(self.norm_out, hidden_states, scale, shift))
        out = hidden_states.view(batch, frames, rows, columns, *self.config["patch_size"], -1)
        return (out.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, *sizes),)

    def block_arguments(self, hidden_states: torch.Tensor, timestep: torch.Tensor, **block_inputs: Any) -> dict[str, Any]:
        """Arguments of the blocks in addition to those that every Wan block has. `hidden_states`: the latent."""
        return block_inputs


class WanTransformer3DModel(WanVariant):
    """diffusers' class of this name, with references in context (Bernini-R: latents of other videos and pictures).

    `reference_channels`: channels of a picture with separate embedding weights (Wan Fun Control). None: no such weights.
    """

    @register_variant
    def __init__(self, *, reference_channels: int | None = None, **wan: Any):
        super().__init__(**wan)
        config = self.config
        self.patch_embedding = Patches(config["in_channels"], reference_channels, self.width, config["patch_size"])


def texts(text: torch.Tensor, picture: torch.Tensor | None, looks_at_picture: bool) -> torch.Tensor | Texts:
    """Embedded text [b, t, width] and picture [b, p, width], as blocks take them.

    `looks_at_picture`: they have layers for the picture. Without one the text stands there twice, for it and for itself.
    """
    if not looks_at_picture:
        return text
    if picture is None:
        picture, text = text.chunk(2, dim=1)
    return Texts(text, picture)


class Rope(WanRotaryPosEmbed):
    """Rotation of the video's tokens, then of reference tokens."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor | None = None,
        scaled: torch.Tensor | None = None,
        frequency: torch.Tensor | None = None,
    ) -> fused.Rotation:
        """Latent [b, C, T, H, W] -> rotation of n + R tokens. `positions` and (`scaled`, `frequency`): arguments `positions`
        and `rope` of WanVariant, the same for all entries."""
        if scaled is None and frequency is None:
            turns = fused.rotation_of_tables(super().forward(hidden_states))
        else:
            sizes = zip(hidden_states.shape[2:], self.patch_size, strict=True)
            grid = torch.cartesian_prod(*(torch.arange(float(size // side)) for size, side in sizes))
            turns = self._turns(to_device(grid, hidden_states.device), scaled, frequency)
        if positions is None:
            return turns
        return torch.cat((turns, self._turns(positions[0, :, :3], scaled, frequency, positions[0, :, 3:])), dim=1)

    def _turns(
        self,
        positions: torch.Tensor,
        scaled: torch.Tensor | None,
        frequency: torch.Tensor | None,
        sources: torch.Tensor | None = None,
    ) -> fused.Rotation:
        """Frame, row, column [n, 3] and number of the source [n, 1] -> rotation of n tokens."""
        positions = positions if scaled is None else positions * scaled[0, 0] + scaled[0, 1]
        frames, *sides = (_frequencies(width, positions.device) for width in (self.t_dim, self.h_dim, self.w_dim))
        if frequency is not None:
            number = torch.arange(len(frames), device=positions.device)
            frames = torch.where(number == frequency[0, 0], frequency[0, 1], frames)
        axes = zip(positions.split(1, -1), (frames, *sides), strict=True)
        angles = torch.cat([axis * frequencies for axis, frequencies in axes], dim=-1)
        if sources is not None:  # a source's number rotates all channels, in addition to the axes
            angles = angles + sources * _frequencies(self.attention_head_dim, positions.device)
        return fused.rotation(angles.cos()[None, :, None], angles.sin()[None, :, None])


def _frequencies(width: int, device: torch.device) -> torch.Tensor:
    """[width / 2]: radians for each position."""
    return 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)


class Patches(nn.Conv3d):
    """Patch embedding of the latent, and of references by the same weights or by `reference`."""

    def __init__(self, channels: int, reference_channels: int | None, width: int, patch: tuple[int, int, int]):
        super().__init__(channels, width, kernel_size=patch, stride=patch)
        self.reference = None
        if reference_channels is not None:
            self.reference = nn.Conv2d(reference_channels, width, kernel_size=patch[1:], stride=patch[1:])

    def forward(self, video: torch.Tensor, references: torch.Tensor | None = None, separate: bool = False) -> torch.Tensor:
        """[b, C, T, H, W], and references packed in patches [b, R, values] -> [b, n + R, width].

        `separate`: references are embedded by the weights of `reference`.
        """
        embedded = tokens(super().forward(video))
        if references is None:
            return embedded
        patches = self.reference if separate and self.reference is not None else self
        return torch.cat((embedded, of_packed(patches, references)), dim=1)


def of_packed(patches: nn.Conv2d | nn.Conv3d, packed: torch.Tensor) -> torch.Tensor:
    """Patches of a latent [b, R, C pt ph pw] -> [b, R, width]: the patch embedding as a linear layer."""
    return F.linear(packed, patches.weight.flatten(1), patches.bias)


def tokens(patches: torch.Tensor) -> torch.Tensor:
    """[b, C, T, H, W] of a patch embedding -> tokens [b, T H W, C]."""
    return patches.flatten(2).transpose(1, 2)
