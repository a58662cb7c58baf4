"""Wan Animate 2. A pose video runs through the same blocks, and every frame that is made looks at its own of the pose's.

Written from the public architecture (Alibaba's Wan-Animate-2), with ComfyUI's arithmetic (comfy/ldm/wan/model_animate2.py).
diffusers' class needs torch's flex attention, compiled.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from torch import nn

from .wan import WanVariant, register_variant, tokens

LEAST_STRENGTH = 1e-6
"""Of the pose: its values are scaled by it, and the pose's own output is scaled back."""


class WanAnimate2(WanVariant):
    """The pose is the tokens' second stream. Its frame j is at frame j + 1 of the video, whose frame 0 is the character."""

    @register_variant
    def __init__(self, **wan: Any):
        super().__init__(**wan)
        self.patch_embedding = PosePatches(self.patches(self.config.in_channels))
        self.blocks = nn.ModuleList(Animate2Block(*self.block_settings) for _ in range(self.config.num_layers))

    def block_arguments(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        reference: torch.Tensor,
        text: torch.Tensor | None,
        picture: torch.Tensor | None,
        strength: torch.Tensor | None,
    ) -> dict[str, Any]:
        """`reference` [b]: strength of frame 0. Of the pose: its `text`, CLIP's `picture` and `strength` [b], else None."""
        _, _, frames, rows, columns = hidden_states.shape
        _, down, right = self.config.patch_size
        of_tokens = torch.ones(len(timestep), frames, rows // down * (columns // right), device=reference.device)
        of_tokens[:, 0] = reference[:, None]
        given = {"reference": of_tokens.flatten(1), "frames": frames}
        if strength is None:
            return given
        _, modulation, text, picture = self.condition_embedder(torch.ones_like(timestep), text, picture)
        # Positions are right of the video's.
        twice = self.rope(hidden_states[..., :1].expand(-1, -1, -1, -1, 2 * columns))
        tables = (table.unflatten(1, (-1, 2, columns // right))[:, :, 1].flatten(1, 2) for table in twice)
        return given | {
            "pose_text": text if picture is None else torch.cat((picture, text), dim=1),
            "pose_temb": modulation.unflatten(-1, (6, -1)),
            "pose_rotary_emb": tuple(tables),
            "strength": strength.clamp(min=LEAST_STRENGTH),
        }


class PosePatches(nn.Module):
    """Patch embedding of the video, and by the same weights of the pose."""

    def __init__(self, video: nn.Conv3d):
        super().__init__()
        self.video = video

    def forward(self, video: torch.Tensor, pose: torch.Tensor | None) -> torch.Tensor:
        """[b, 36, T, H, W] and [b, 16, T - 1, H, W] -> [b, n, 2 width]. Zeros where there is no pose."""
        made = self.video(video)
        moved = torch.zeros_like(made)
        if pose is not None:
            # As the video's channels: the latent, a mask that says that all of it is known, and it again.
            moved[:, :, 1:] = self.video(torch.cat((pose, torch.ones_like(pose[:, :4]), pose), dim=1))
        return tokens(torch.cat((made, moved), dim=1))


class PoseTokens(NamedTuple):
    """What self-attention is given in the place of rotary tables. s streams, one behind the other in the batch."""

    cos: torch.Tensor
    """[s b, n, 1, D]."""
    sin: torch.Tensor
    """As `cos`."""
    values: torch.Tensor
    """[s b, n]: factor of the tokens' values, of the video's what it attends to."""
    strength: torch.Tensor | None
    """[b]: factor that the pose's values have. None: there is no pose."""
    frames: int
    """Of the whole video, which has its tokens frame by frame. Ranks have some of them."""


class Animate2Block(WanTransformerBlock):
    """Wan's block, for both streams at once as a batch of twice as many entries."""

    def __init__(self, *block: Any):
        super().__init__(*block)
        self.attn1.processor = PairedProcessor()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        reference: torch.Tensor,
        frames: int,
        pose_text: torch.Tensor | None = None,
        pose_temb: torch.Tensor | None = None,
        pose_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        strength: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, n, 2 width]. `reference` [b, n], `frames`, `strength`: see PoseTokens. Without a pose its stream stays."""
        video, pose = hidden_states.chunk(2, dim=-1)
        if strength is None:
            pose_tokens = PoseTokens(*rotary_emb, reference, None, frames)
            return torch.cat((super().forward(video, encoder_hidden_states, temb, pose_tokens), pose), dim=-1)
        tables = (
            torch.cat([each.expand(len(video), -1, -1, -1) for each in pair])
            for pair in zip(rotary_emb, pose_rotary_emb, strict=True)
        )
        values = torch.cat((reference, strength[:, None].expand_as(reference)))
        out = super().forward(
            torch.cat((video, pose)),
            torch.cat((encoder_hidden_states, pose_text)),
            torch.cat((temb, pose_temb)),
            PoseTokens(*tables, values, strength, frames),
        )
        return torch.cat(out.chunk(2), dim=-1)


class PairedProcessor:
    """Self-attention of both streams. A head's channels are the video's, then the pose's, so that they stay together."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self, attn: WanAttention, hidden_states: torch.Tensor, _text: None, _mask: None, pose_tokens: PoseTokens
    ) -> torch.Tensor:
        """[s b, n, width] -> the same."""
        query, key, value = (layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key), value))
        query, key = (_rotated(x, pose_tokens) for x in (query, key))
        heads = [query, key, value * pose_tokens.values[..., None, None].to(value.dtype)]
        if pose_tokens.strength is not None:
            heads = [torch.cat(x.chunk(2), dim=-1) for x in heads]
        if self._parallel_config is None and pose_tokens.strength is not None:
            out = paired_attention(*heads, pose_tokens.frames)
        else:
            out = dispatch_attention_fn(*heads, backend=self._attention_backend, parallel_config=self._parallel_config)
        if pose_tokens.strength is not None:
            video, pose = out.chunk(2, dim=-1)
            out = torch.cat((video, pose / pose_tokens.strength[:, None, None, None].to(pose.dtype)))
        return attn.to_out[1](attn.to_out[0](out.flatten(2).type_as(hidden_states)))


def _rotated(x: torch.Tensor, pose_tokens: PoseTokens) -> torch.Tensor:
    """[B, n, H, D], as diffusers' Wan rotates them."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = pose_tokens.cos[..., 0::2], pose_tokens.sin[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).type_as(x)


def paired_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, frames: int) -> torch.Tensor:
    """[b, n, H, 2 D], tokens of `frames` frames one behind the other: what one device with all of them computes.

    The pose attends to itself, without frame 0, which it has not. The video attends to itself and, in each other frame, to
    that frame of the pose.
    """
    (video, pose), (video_keys, pose_keys), (video_values, pose_values) = (
        x.transpose(1, 2).chunk(2, dim=-1) for x in (query, key, value)
    )
    frame = torch.arange(query.shape[1], device=query.device) // (query.shape[1] // frames)
    posed = (frame > 0)[None].expand(len(frame), -1)
    own = posed & (frame[:, None] == frame[None])
    made = F.scaled_dot_product_attention(
        video,
        torch.cat((video_keys, pose_keys), dim=2),
        torch.cat((video_values, pose_values), dim=2),
        attn_mask=torch.cat((torch.ones_like(own), own), dim=1),
    )
    moved = F.scaled_dot_product_attention(pose, pose_keys, pose_values, attn_mask=posed)
    return torch.cat((made, moved), dim=-1).transpose(1, 2)
