"""Wan's models and blocks in a form that ranks can cut, and the rotary frequency that RIFLEx replaces."""

import functools
import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.own_class.adapters.ltx_forms import Indexed
from parallel_backend.own_class.cuts.forms import Form

FREQUENCY = "parallel_dit_rope_frequency"
"""Entry of transformer_options: (number, radians) of the frame axis' rotary frequency that RIFLEx replaces (arXiv
2502.15894)."""
FACE_SIDE = 512
"""Height and width, in pixels, of the images that Wan Animate's motion encoder takes."""
FACES = 4
"""Number of such images for each latent frame except the first."""
EVERY = 5
"""Every EVERY-th block has a module after it that attends to faces."""
OF_FACE = re.compile(r"^blocks\.(\d+)\.face\.")
MOTION = "parallel_dit_motion"
"""Option of Wan Animate's blocks: the motion of the frames, an `Indexed`."""


class WanModel(Form):
    """Wan's model, which takes the option FREQUENCY. KJNodes' RIFLEx puts another module for positions into the model
    instead."""

    def rope_encode(self, *sizes, transformer_options, **named):
        make = functools.partial(super().rope_encode, *sizes, transformer_options=transformer_options, **named)
        if FREQUENCY not in transformer_options:
            return make()
        replaced = functools.partial(with_frequency, *transformer_options[FREQUENCY])
        with self.rope_embedder.register_forward_hook(replaced):
            return make()


def with_frequency(
    number: float, radians: float, _module: nn.Module, given: tuple[Any, ...], turns: torch.Tensor
) -> torch.Tensor:
    """Return rotations [B, 1, S, D / 2, 2, 2] of tokens at the `given` positions [B, S, 3], with frequency `number` of the
    frame axis replaced by `radians`."""
    angles = given[0][..., 0].float() * radians
    turn = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), dim=-1).unflatten(-1, (2, 2))
    turns = turns.clone()
    turns[:, 0, :, int(number)] = turn.to(turns)
    return turns


class WanBlock(Form):
    """Wan's block. If frames have different timesteps, their vectors [B, F, 6, D] are passed as an `Indexed`, which ranks
    can cut by tokens. In all blocks the rotary table has a row for every token."""

    def __call__(self, x, e, freqs, **named):
        if e.shape[1] > 1:
            e = Indexed.of(e, freqs.shape[1])
        return super().__call__(x, e=e, freqs=freqs, **named)

    def forward(self, x, e, **named):
        if isinstance(e, Indexed):
            e = e.data_BFD if x.shape[1] == e.tokens else e.data_BFD[:, e.index_S]
        return super().forward(x, e=e, **named)


class WanAnimateModel(WanModel):
    """Like `WanModel`, but it takes the result of `face_motion` instead of `face_pixel_values`. The option MOTION then has
    the motion of each frame, and for each token the number of its frame."""

    def face_motion(self, face_pixel_values):
        """Motion [B, 1 + f / FACES, 5, D] of the latent's frames, zeros in the first, from [B, 3, f, FACE_SIDE, FACE_SIDE].
        Runs in ComfyUI's process. Raises ValueError for images of another size."""
        if face_pixel_values.shape[-2:] != (FACE_SIDE, FACE_SIDE):
            height, width = face_pixel_values.shape[-2:]
            raise ValueError(
                f"positive, negative: the face video is {width} x {height}, this model needs {FACE_SIDE} x "
                f"{FACE_SIDE}. Use WanAnimateToVideo."
            )
        frames = 1 + math.ceil(face_pixel_values.shape[2] / FACES)
        of_frames = face_pixel_values.new_empty(0, 0, frames)  # the class asks a latent for its frames alone
        return self.after_patch_embedding(of_frames, None, face_pixel_values)[1]

    def forward_orig(self, x, t, context, face_pixel_values=None, transformer_options=None, **named):
        options = dict(transformer_options or {})
        if face_pixel_values is not None:
            frames, *sides = (size // by for size, by in zip(x.shape[2:], self.patch_size, strict=True))
            motion_BFND = F.pad(face_pixel_values, (0, 0, 0, 0, 0, frames - face_pixel_values.shape[1]))
            options[MOTION] = Indexed.of(motion_BFND, frames * math.prod(sides))
        return super().forward_orig(x, t, context, transformer_options=options, **named)


def put_faces_into_blocks(model: nn.Module) -> None:
    """Move the modules that the model runs after every EVERY-th block, the first included, into those blocks as `face`.
    Ranks cut lists of blocks, and a trial needs only few of each list."""
    blocks = list(model.get_submodule("blocks").children())
    for number, face in enumerate(model.get_submodule("face_adapter.fuser_blocks").children()):
        blocks[EVERY * number].face = face
    del model.face_adapter


def name_of_face(name: str) -> str:
    """Return the class's own name of a parameter, for a model with its faces moved into its blocks."""
    return OF_FACE.sub(lambda found: f"face_adapter.fuser_blocks.{int(found[1]) // EVERY}.", name)


class WanAnimateBlock(Form):
    """Wan Animate's block. If the block has a module `face`, that runs after it: each token attends to the motion of its
    frame. The mask is over all frames' motion, which every rank has, because a rank's tokens may belong to any frames."""

    def forward(self, x, transformer_options=None, **named):
        options = dict(transformer_options or {})
        motion = options.pop(MOTION, None)
        x = super().forward(x, transformer_options=options, **named)
        return x if motion is None or not hasattr(self, "face") else x + self._seen(self.face, x, *motion)

    def _seen(self, face, x, motion_BFND, index_S, _tokens):
        frames = torch.arange(motion_BFND.shape[1], device=x.device).repeat_interleave(motion_BFND.shape[2])
        keys, values = face.linear1_kv(face.pre_norm_motion(motion_BFND.flatten(1, 2))).chunk(2, dim=-1)
        queries = face.linear1_q(face.pre_norm_feat(x))
        q, k, v = (each.unflatten(-1, (face.heads_num, -1)).transpose(1, 2) for each in (queries, keys, values))
        seen_SK = index_S[:, None] == frames
        out = F.scaled_dot_product_attention(face.q_norm(q).to(v), face.k_norm(k).to(v), v, attn_mask=seen_SK)
        return face.linear2(out.transpose(1, 2).flatten(2))
