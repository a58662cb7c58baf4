"""Wan 2.2 Animate. A pose video is added to the video's tokens. After some blocks each frame attends to its face picture.

Layers are diffusers', their order is ComfyUI's. diffusers' class needs a pose of exactly the video's length.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan_animate import (
    WanAnimateFaceBlockCrossAttention,
    WanAnimateFaceEncoder,
    WanAnimateMotionEncoder,
)
from torch import nn

from . import fused
from .wan import WanVariant, register_variant, tokens
from .wan_block import Block
from .wan_text import TextProcessor


class WanAnimateTransformer3DModel(WanVariant):
    """Constructor arguments as diffusers' class of this name."""

    @register_variant
    def __init__(
        self,
        *,
        latent_channels: int = 16,
        motion_encoder_channel_sizes: dict[str, int] | None = None,
        motion_encoder_size: int = 512,
        motion_style_dim: int = 512,
        motion_dim: int = 20,
        motion_encoder_dim: int = 512,
        face_encoder_hidden_dim: int = 1024,
        face_encoder_num_heads: int = 4,
        inject_face_latents_blocks: int = 5,
        motion_encoder_batch_size: int = 8,
        **wan: Any,
    ):
        super().__init__(**wan)
        config = self.config
        self.patch_embedding = PosedPatches(self.patches(config["in_channels"]), self.patches(latent_channels))
        self.faces = FaceMotion(
            WanAnimateMotionEncoder(
                motion_encoder_size, motion_style_dim, motion_dim, motion_encoder_dim, channels=motion_encoder_channel_sizes
            ),
            WanAnimateFaceEncoder(motion_encoder_dim, self.width, face_encoder_hidden_dim, face_encoder_num_heads),
            motion_encoder_batch_size,
        )
        self.blocks = nn.ModuleList(
            AnimateBlock(*self.block_settings, face=index % inject_face_latents_blocks == 0)
            for index in range(config["num_layers"])
        )

    def block_arguments(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, faces: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """`faces` [b, 3, t, side, side]: pictures, four for each latent frame but the first. None: no faces."""
        if faces is None:
            return {}
        frames, rows, columns = (
            size // side for size, side in zip(hidden_states.shape[2:], self.config["patch_size"], strict=True)
        )
        motion = self.faces(faces)
        motion = F.pad(motion, (0, 0, 0, 0, 1, max(frames - 1 - motion.shape[1], 0)))[:, :frames]
        frame = torch.arange(frames, device=motion.device)
        seen = frame.repeat_interleave(rows * columns)[:, None] == frame.repeat_interleave(motion.shape[2])[None]
        return {"motion": motion.flatten(1, 2), "seen": seen}


class PosedPatches(nn.Module):
    """Patch embedding of the video, plus that of the pose from the second frame on."""

    def __init__(self, video: nn.Conv3d, pose: nn.Conv3d):
        super().__init__()
        self.video, self.pose = video, pose

    def forward(self, video: torch.Tensor, pose: torch.Tensor | None) -> torch.Tensor:
        """[b, C, T, H, W] and [b, 16, t, H, W] -> [b, n, width]."""
        embedded = self.video(video)
        if pose is not None:
            moved = self.pose(pose)[:, :, : embedded.shape[2] - 1]
            embedded[:, :, 1 : moved.shape[2] + 1] += moved
        return tokens(embedded)


class FaceMotion(nn.Module):
    """Encodes the motion in a video of faces."""

    def __init__(self, motion_encoder: nn.Module, face_encoder: nn.Module, at_once: int):
        """`at_once`: number of pictures that are encoded together, which bounds memory."""
        super().__init__()
        self.motion_encoder, self.face_encoder, self.at_once = motion_encoder, face_encoder, at_once

    def forward(self, faces: torch.Tensor) -> torch.Tensor:
        """[b, 3, t, side, side] -> [b, about t / 4, motion tokens, width]."""
        pictures = faces.transpose(1, 2).flatten(0, 1)
        motion = torch.cat([self.motion_encoder(part) for part in pictures.split(self.at_once)])
        return self.face_encoder(motion.view(len(faces), -1, motion.shape[-1]))


class AnimateBlock(Block):
    """Wan's block and, with `face`, cross-attention to the motion of faces after it."""

    def __init__(self, width: int, ffn: int, heads: int, *block: Any, face: bool):
        super().__init__(width, ffn, heads, *block)
        size = width // heads
        self.attn2.processor = TextProcessor()
        self.face = WanAnimateFaceBlockCrossAttention(width, heads, size, 1e-6, size) if face else None
        if self.face is not None:
            self.face.processor = FaceProcessor()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any,
        temb: torch.Tensor,
        rotary_emb: fused.Rotation,
        motion: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, n, width], `motion` [b, m, width] -> [b, n, width]. `seen` [n, m] bool: motion tokens of a token's frame."""
        hidden_states = super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
        if self.face is None or motion is None:
            return hidden_states
        return hidden_states + self.face(hidden_states, motion, seen)


class FaceProcessor:
    """Cross-attention with the mask `seen` [n, m], for any n tokens of the video in any order."""

    def __call__(
        self, attn: WanAnimateFaceBlockCrossAttention, hidden_states: torch.Tensor, motion: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        motion = attn.pre_norm_kv(motion)
        query, key, value = attn.to_q(attn.pre_norm_q(hidden_states)), attn.to_k(motion), attn.to_v(motion)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        query, key, value = (x.transpose(1, 2) for x in (attn.norm_q(query), attn.norm_k(key), value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return attn.to_out(out.transpose(1, 2).flatten(2).type_as(hidden_states))
