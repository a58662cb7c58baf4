"""Wan VACE. A control video runs through control blocks, whose outputs are added after some of Wan's blocks.

diffusers' WanVACETransformer3DModel runs all control blocks first. Here a control block runs after the block that it adds
to, as in ComfyUI (comfy/ldm/wan/model.py), so that pipeline stages pass on one control stream, not every output.
"""

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from torch import nn

from . import fused
from .wan import WanVariant, register_variant, tokens
from .wan_block import Block, RotaryProcessor, run
from .wan_text import TextProcessor, Texts, plain


class WanVACETransformer3DModel(WanVariant):
    """Constructor arguments as diffusers' class of this name."""

    @register_variant
    def __init__(
        self,
        *,
        vace_layers: tuple[int, ...] = (0, 5, 10, 15, 20, 25, 30, 35),
        vace_in_channels: int = 96,
        **wan: Any,
    ):
        super().__init__(**wan)
        self.patch_embedding = ControlledPatches(self.patches(self.config["in_channels"]), self.patches(vace_in_channels))
        self.blocks = nn.ModuleList(
            VaceBlock(*self.block_settings, control=index in vace_layers, first=index == 0)
            for index in range(self.config["num_layers"])
        )


class ControlledPatches(nn.Module):
    """Patch embeddings of the latent and the control video, as two streams."""

    def __init__(self, video: nn.Conv3d, control: nn.Conv3d):
        super().__init__()
        self.video, self.control = video, control

    def forward(self, video: torch.Tensor, control: torch.Tensor | None) -> torch.Tensor:
        """[b, C, T, H, W] and [b, control channels, T, H, W] (None: zeros) -> [b, n, 2 width]."""
        if control is None:
            control = video.new_zeros(len(video), self.control.in_channels, *video.shape[2:])
        return tokens(torch.cat((self.video(video), self.control(control)), dim=1))


class ControlBlock(WanVACETransformerBlock):
    """diffusers' control block."""

    def forward(self, hidden_states, encoder_hidden_states, control_hidden_states, temb, rotary_emb):
        """Video and control [b, n, width] -> what is added to the video, and the control."""
        control = control_hidden_states
        if self.proj_in is not None:
            control = self.proj_in(control) + hidden_states
        control = run(self, control, encoder_hidden_states, temb, rotary_emb)
        return self.proj_out(control), control


class VaceBlock(Block):
    """Wan's block and, with `control`, the control block after it."""

    def __init__(self, *block: Any, control: bool, first: bool):
        super().__init__(*block)
        self.attn2.processor = TextProcessor()
        self.vace = None
        if control:
            self.vace = ControlBlock(*block, apply_input_projection=first, apply_output_projection=True)
            self.vace.attn1.processor = RotaryProcessor()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | Texts,
        temb: torch.Tensor,
        rotary_emb: fused.Rotation,
        strength: torch.Tensor,
    ) -> torch.Tensor:
        """[b, n, 2 width] (video's stream, control's) -> the same shape. `strength` [b]: factor of the control."""
        before, control = hidden_states.chunk(2, dim=-1)
        video = super().forward(before, encoder_hidden_states, temb, rotary_emb)
        if self.vace is not None:
            hint, control = self.vace(before, plain(encoder_hidden_states), control, temb, rotary_emb)
            video = video + hint * strength[:, None, None].to(hint.dtype)
        return torch.cat((video, control), dim=-1)
