"""Wan's models and blocks in the form that ranks cut, with the frequency that RIFLEx replaces."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .ltx_forms import Indexed

FREQUENCY = "parallel_dit_rope_frequency"
"""Entry of transformer_options: (number, radians) of a frequency of the frames' axis, which RIFLEx replaces (arXiv
2502.15894)."""
FACE_SIDE = 512
"""Of the pictures that Wan Animate's motion encoder takes, in pixels."""
FACES = 4
"""Of them for each of the latent's frames but the first."""


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


@functools.cache
def wan_animate_model(kind: type[nn.Module]) -> type[nn.Module]:
    """As `wan_model`. It takes what `face_motion` makes of `face_pixel_values` in their place."""

    class WithMotion(wan_model(kind)):  # type: ignore[misc]
        def face_motion(self, face_pixel_values):
            """[B, 3, f, FACE_SIDE, FACE_SIDE] -> [B, 1 + f / FACES, 5, D]: of the latent's frames, zeros in the first.

            ComfyUI's process runs it. ValueError for pictures of another size."""
            if face_pixel_values.shape[-2:] != (FACE_SIDE, FACE_SIDE):
                height, width = face_pixel_values.shape[-2:]
                raise ValueError(
                    f"positive, negative: the face video is {width} x {height}, this model needs {FACE_SIDE} x {FACE_SIDE}. "
                    "WanAnimateToVideo makes it so."
                )
            frames = 1 + math.ceil(face_pixel_values.shape[2] / FACES)
            of_frames = face_pixel_values.new_empty(0, 0, frames)  # the class asks a latent for its frames alone
            return super().after_patch_embedding(of_frames, None, face_pixel_values)[1]

        def after_patch_embedding(self, x, pose_latents, face_pixel_values):
            x, _ = super().after_patch_embedding(x, pose_latents, None)
            if face_pixel_values is None:
                return x, None
            frames, tokens = x.shape[2], x[0, 0].numel()
            motion_BFND = F.pad(face_pixel_values, (0, 0, 0, 0, 0, frames - face_pixel_values.shape[1]))
            return x, Indexed(motion_BFND, torch.arange(tokens, device=x.device) // (tokens // frames), tokens)

    return WithMotion


@functools.cache
def wan_face_block(kind: type[nn.Module]) -> type[nn.Module]:
    """Each token attends to the motion of its frame, by a mask over that of all frames, which every rank has: a part of the
    tokens may have any of each frame's."""

    class ByIndex(kind):  # type: ignore[valid-type, misc]
        def forward(self, x, motion_vec):
            motion_BFND, index_S, _ = motion_vec
            frames = torch.arange(motion_BFND.shape[1], device=x.device).repeat_interleave(motion_BFND.shape[2])
            keys, values = self.linear1_kv(self.pre_norm_motion(motion_BFND.flatten(1, 2))).chunk(2, dim=-1)
            queries = self.linear1_q(self.pre_norm_feat(x))
            q, k, v = (each.unflatten(-1, (self.heads_num, -1)).transpose(1, 2) for each in (queries, keys, values))
            seen_SK = index_S[:, None] == frames
            out = F.scaled_dot_product_attention(self.q_norm(q).to(v), self.k_norm(k).to(v), v, attn_mask=seen_SK)
            return self.linear2(out.transpose(1, 2).flatten(2))

    return ByIndex
