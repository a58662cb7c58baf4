"""Wan Animate 2. A pose video runs through the same blocks, and every generated frame attends to the same frame of the pose.

Written from the public architecture (Alibaba's Wan-Animate-2), with ComfyUI's arithmetic (comfy/ldm/wan/model_animate2.py).
diffusers' class needs compiled flex attention.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_wan as original
from diffusers.models.transformers.transformer_wan import WanAttention, WanRotaryPosEmbed
from torch import nn

from . import fused
from .constructors import extends
from .wan_block import Block
from .wan_text import TextProcessor, Texts

LEAST_STRENGTH = 1e-6
"""Least strength of the pose. Its values are multiplied by the strength, and the pose's output is divided by it."""


class WanAnimate2(original.WanTransformer3DModel):
    """The pose is the tokens' second stream, whose channels follow the first one's, so that every cut of the sequence moves
    them with the token. Its frame j is at frame j + 1 of the video, whose frame 0 is the character."""

    patch_embedding: Any

    @extends(original.WanTransformer3DModel)
    def __init__(self, **wan: Any):
        super().__init__(**wan)
        config = self.config
        heads, patch = config["num_attention_heads"], config["patch_size"]
        width = heads * config["attention_head_dim"]
        further = (config["qk_norm"], config["cross_attn_norm"], config["eps"], config["added_kv_proj_dim"])
        self.rope = Rope(config["attention_head_dim"], patch, config["rope_max_seq_len"])
        self.patch_embedding = PosePatches(nn.Conv3d(config["in_channels"], width, kernel_size=patch, stride=patch))
        self.blocks = nn.ModuleList(
            Animate2Block(width, config["ffn_dim"], heads, *further) for _ in range(config["num_layers"])
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        pose: torch.Tensor | None = None,
        block_inputs: dict[str, Any] | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """[b, C, T, H, W] in whole patches, timestep [b], text [b, t, text_dim] -> [b, out_channels, T, H, W].

        `pose` [b, 16, T - 1, H, W]. `block_inputs`: arguments of `block_arguments`.
        """
        assert not return_dict
        batch, _, *sizes = hidden_states.shape
        frames, rows, columns = (size // side for size, side in zip(sizes, self.config["patch_size"], strict=True))
        rotary_emb = self.rope(hidden_states)
        block_arguments = self.block_arguments(hidden_states, timestep, **(block_inputs or {}))
        hidden_states = self.patch_embedding(hidden_states, pose)
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

    def block_arguments(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        reference: torch.Tensor,
        text: torch.Tensor | None,
        picture: torch.Tensor | None,
        strength: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Arguments of the blocks in addition to those of `Block`. `hidden_states`: the latent. `reference` [b]: strength of
        frame 0. Of the pose: `text`, CLIP's `picture`, `strength` [b]; None without a pose."""
        _, _, frames, rows, columns = hidden_states.shape
        _, down, right = self.config["patch_size"]
        token_strength = torch.ones(len(timestep), frames, rows // down * (columns // right), device=reference.device)
        token_strength[:, 0] = reference[:, None]
        arguments = {"reference": token_strength.flatten(1), "frames": frames}
        if strength is None:
            return arguments
        _, modulation, text, picture = self.condition_embedder(torch.ones_like(timestep), text, picture)
        # The pose's positions follow the video's to the right.
        twice = self.rope(hidden_states[..., :1].expand(-1, -1, -1, -1, 2 * columns))
        return arguments | {
            "pose_text": texts(text, picture),
            "pose_temb": modulation.unflatten(-1, (6, -1)),
            "pose_rotary_emb": twice.unflatten(1, (-1, 2, columns // right))[:, :, 1].flatten(1, 2),
            "strength": strength.clamp(min=LEAST_STRENGTH),
        }


def texts(text: torch.Tensor, picture: torch.Tensor | None) -> Texts:
    """Embedded text [b, t, width] and picture [b, p, width], as blocks take them.

    Without a picture the text stands there twice, for it and for itself.
    """
    if picture is None:
        picture, text = text.chunk(2, dim=1)
    return Texts(text, picture)


class Rope(WanRotaryPosEmbed):
    """Rotation of the video's tokens."""

    def forward(self, hidden_states: torch.Tensor) -> fused.Rotation:
        """Latent [b, C, T, H, W] -> rotation of n tokens."""
        return fused.rotation_of_tables(super().forward(hidden_states))


class PosePatches(nn.Module):
    """Patch embedding of the video and the pose, by the same weights, as two streams."""

    def __init__(self, video: nn.Conv3d):
        super().__init__()
        self.video = video

    def forward(self, video: torch.Tensor, pose: torch.Tensor | None) -> torch.Tensor:
        """[b, 36, T, H, W] and [b, 16, T - 1, H, W] -> [b, n, 2 width]. Zeros where there is no pose."""
        embedded = self.video(video)
        embedded_pose = torch.zeros_like(embedded)
        if pose is not None:
            # The weights take 36 channels: a latent, a mask (all known), and the known latent.
            embedded_pose[:, :, 1:] = self.video(torch.cat((pose, torch.ones_like(pose[:, :4]), pose), dim=1))
        return torch.cat((embedded, embedded_pose), dim=1).flatten(2).transpose(1, 2)


class PoseTokens(NamedTuple):
    """Takes the place of rotary tables in self-attention. The s streams (1 or 2) are concatenated in the batch."""

    turns: fused.Rotation
    """Of [s b, n, 1] tokens, or [1, n, 1]."""
    values: torch.Tensor
    """[s b, n]: factor of each token's values."""
    strength: torch.Tensor | None
    """[b]: factor of the pose's values. None: there is no pose."""
    frames: int
    """Frames of the whole video, whose tokens are ordered frame by frame. A rank has some of the tokens."""


class Animate2Block(Block):
    """Wan's block on both streams at once, as a batch of twice as many entries."""

    def __init__(self, *block: Any):
        super().__init__(*block)
        text: Any = self.attn2
        self.attn1.processor, text.processor = PairedProcessor(), TextProcessor()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Texts,
        temb: torch.Tensor,
        rotary_emb: fused.Rotation,
        reference: torch.Tensor,
        frames: int,
        pose_text: Texts | None = None,
        pose_temb: torch.Tensor | None = None,
        pose_rotary_emb: fused.Rotation | None = None,
        strength: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[b, n, 2 width] -> the same shape. `reference` [b, n]: factor of the video's values. `frames`, `strength`: see
        PoseTokens. Without a pose the second stream is returned unchanged."""
        video, pose = hidden_states.chunk(2, dim=-1)
        if strength is None:
            pose_tokens = PoseTokens(rotary_emb, reference, None, frames)
            return torch.cat((super().forward(video, encoder_hidden_states, temb, pose_tokens), pose), dim=-1)
        assert pose_text is not None and pose_temb is not None and pose_rotary_emb is not None
        turns = torch.cat([each.expand(len(video), *each.shape[1:]) for each in (rotary_emb, pose_rotary_emb)])
        values = torch.cat((reference, strength[:, None].expand_as(reference)))
        out = super().forward(
            torch.cat((video, pose)),
            both(encoder_hidden_states, pose_text),
            torch.cat((temb, pose_temb)),
            PoseTokens(turns, values, strength, frames),
        )
        return torch.cat(out.chunk(2), dim=-1)


def both(text: Texts, pose: Texts) -> Texts:
    """The texts of the video and of the pose, of one length, as one batch."""
    return Texts(torch.cat((text.text, pose.text)), torch.cat((text.picture, pose.picture)))


class PairedProcessor:
    """Self-attention of both streams. A head's channels are the video's, then the pose's, so that every cut of heads or
    tokens keeps them together."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self, attn: WanAttention, hidden_states: torch.Tensor, _text: None, _mask: None, pose_tokens: PoseTokens
    ) -> torch.Tensor:
        """[s b, n, width] -> the same shape."""
        query, key, value = (layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key), value))
        query, key = fused.both_rotated(query, key, pose_tokens.turns)
        value = value * pose_tokens.values[..., None, None].to(value.dtype)
        if pose_tokens.strength is not None:
            query, key, value = (torch.cat(x.chunk(2), dim=-1) for x in (query, key, value))
        backend, parallel = self._attention_backend, self._parallel_config
        if parallel is None and pose_tokens.strength is not None:
            out = paired_attention(query, key, value, pose_tokens.frames)
        else:
            out = dispatch_attention_fn(query, key, value, backend=backend, parallel_config=parallel)
        if pose_tokens.strength is not None:
            video, pose = out.chunk(2, dim=-1)
            out = torch.cat((video, pose / pose_tokens.strength[:, None, None, None].to(pose.dtype)))
        return attn.to_out[1](attn.to_out[0](out.flatten(2).type_as(hidden_states)))


def paired_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, frames: int) -> torch.Tensor:
    """Attention PAIRED (base/blocks.py) on one device with all tokens: [b, n, H, 2 D], ordered frame by frame."""
    (video, pose), (video_keys, pose_keys), (video_values, pose_values) = (
        x.transpose(1, 2).chunk(2, dim=-1) for x in (query, key, value)
    )
    frame = torch.arange(query.shape[1], device=query.device) // (query.shape[1] // frames)
    posed = (frame > 0)[None].expand(len(frame), -1)
    same_frame = posed & (frame[:, None] == frame[None])
    video_out = F.scaled_dot_product_attention(
        video,
        torch.cat((video_keys, pose_keys), dim=2),
        torch.cat((video_values, pose_values), dim=2),
        attn_mask=torch.cat((torch.ones_like(same_frame), same_frame), dim=1),
    )
    pose_out = F.scaled_dot_product_attention(pose, pose_keys, pose_values, attn_mask=posed)
    return torch.cat((video_out, pose_out), dim=-1).transpose(1, 2)
