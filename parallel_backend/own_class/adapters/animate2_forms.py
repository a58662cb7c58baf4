"""Wan Animate 2 in a form that ranks can cut: the pose is a second stream beside the video's tokens.

A token has the video's channels, and behind them the pose's at the same position, so every cut of the sequence moves both.
Frame 0 of the video is the character. The pose has no such frame: it has zeros there, and nothing attends to them.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from parallel_backend.core.device_copies import to_device
from parallel_backend.own_class.cuts.attention_calls import AttendAll, Rows, attention_by_rows, kept_with, module_global
from parallel_backend.own_class.cuts.forms import Form

BESIDE = "parallel_dit_beside"
"""Entry of transformer_options for the blocks: a Beside. Missing: there is no pose, and the character has strength 1."""
MASK = 4
"""Channels of the mask, between latent and reference latent in the patch embedding's input."""


class Stream(NamedTuple):
    """A block's arguments for one of the two streams."""

    e: torch.Tensor
    freqs: torch.Tensor
    context: torch.Tensor
    context_img_len: int | None


class Beside(NamedTuple):
    """A block's arguments in addition to those for the video."""

    factors: torch.Tensor | None = None
    """[1, S, 1, 1]: factor of each token's values in the video's attention. None: all are 1."""
    rule: "SameFrame | None" = None
    """The rule of the call's attention. None: there is no pose."""
    pose: Stream | None = None


@dataclass(frozen=True)
class SameFrame:
    """Attention in which the video's queries see all of the video's keys and the pose's keys of their frame. The pose's
    queries see all of the pose's keys. Heads have the video's channels, then the pose's."""

    tokens: int
    """Number of tokens in a frame."""
    strength: float
    """Factor of the pose's values that the video's queries see."""

    def __call__(self, attend: AttendAll, rows: Rows) -> torch.Tensor:
        """Attention as a RowRule. Frames may lack keys."""
        q_BQHE, k_BKHE, v_BKHE, queries_Q, keys_K = rows
        (q, pose_q), (k, pose_k), (v, pose_v) = (x.chunk(2, dim=-1) for x in (q_BQHE, k_BKHE, v_BKHE))
        of_queries, of_keys = (
            kept_with(numbers, (self, q.device), functools.partial(self._by_frame, numbers, q.device))
            for numbers in (queries_Q, keys_K)
        )
        out = torch.zeros_like(q_BQHE)
        of_video, of_pose = out.chunk(2, dim=-1)
        posed = [of_frame for frame, of_frame in of_keys.items() if frame]
        if posed:
            of_pose.copy_(attend(pose_q, *(torch.cat([x[:, each] for each in posed], dim=1) for x in (pose_k, pose_v))))
        count = k.shape[1]
        # The video's keys stay, and behind them come the pose's of one frame after the other, as in ComfyUI's class.
        both_k, both_v = (F.pad(x, (0, 0, 0, 0, 0, self.tokens)) for x in (k, v))
        for frame, own in of_queries.items():
            of_frame = of_keys.get(frame) if frame else None
            stop = count
            if of_frame is not None:
                added_k, added_v = pose_k[:, of_frame], pose_v[:, of_frame] * self.strength
                stop += added_k.shape[1]
                both_k[:, count:stop], both_v[:, count:stop] = added_k, added_v
            of_video[:, own] = attend(q[:, own], both_k[:, :stop], both_v[:, :stop])
        return out

    def _by_frame(self, numbers: torch.Tensor, device: torch.device) -> dict[int, slice | torch.Tensor]:
        """Return frame -> rows of its tokens."""
        frames, order = torch.sort(numbers // self.tokens, stable=True)
        present, counts = frames.unique_consecutive(return_counts=True)
        parts = order.split(counts.tolist())
        return {frame: in_a_row(rows, device) for frame, rows in zip(present.tolist(), parts, strict=True)}


def in_a_row(rows: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    """Return the rows as a slice if they are consecutive, which saves a copy. Otherwise their numbers [n] on the device."""
    count = len(rows)
    first = int(rows[0]) if count else 0
    if torch.equal(rows, torch.arange(first, first + count)):
        return slice(first, first + count)
    return to_device(rows, device)


class Animate2Model(Form):
    """Wan Animate 2's model with the pose as a second stream. `pose_latents` have as many frames as the latent, see
    animate2_arguments."""

    def forward_orig(
        self,
        x,
        t,
        context,
        clip_fea=None,
        freqs=None,
        freqs_pose=None,
        pose_latents=None,
        clip_fea_pose=None,
        context_pose=None,
        pose_strength=1.0,
        reference_strength=1.0,
        transformer_options=None,
        **_others,
    ):
        sizes = [size // by for size, by in zip(x.shape[2:], self.patch_size, strict=True)]
        tokens = math.prod(sizes[1:])
        options, factors = dict(transformer_options or {}), None
        if reference_strength != 1.0:
            factors = torch.ones(1, math.prod(sizes), 1, 1, device=x.device)
            factors[:, :tokens] = reference_strength
            options[BESIDE] = Beside(factors)
        of_wan = super(self.native, self).forward_orig  # type: ignore[misc]
        forward = functools.partial(of_wan, x, t, context, clip_fea, freqs, options)
        if pose_latents is None:
            return forward()
        if pose_latents.shape[2:] != x.shape[2:]:
            made, needed = (" x ".join(map(str, each.shape[2:])) for each in (pose_latents, x))
            raise ValueError(
                f"the pose video, with a frame for the reference image, is made for a latent of {made} (frames, rows, "
                f"columns), the latent_image takes {needed}. Give both nodes the same length, width and height, and those "
                "in multiples of 16."
            )
        own_text, image = context_pose, clip_fea_pose
        text = self._text(context if own_text is None else own_text, clip_fea if image is None else image)
        pose = Stream(self._time(t, x.dtype), freqs_pose, *text)
        options[BESIDE] = Beside(factors, SameFrame(tokens, pose_strength), pose)
        posed = pose_latents[:, :, 1:]
        known = torch.cat((posed, torch.ones_like(posed[:, :MASK]), posed), dim=1)
        embedded = F.pad(self.patch_embedding(known.float()), (0, 0, 0, 0, 1, 0))
        of_both = self.patch_embedding.register_forward_hook(lambda _layer, _given, out: torch.cat((out, embedded), dim=1))
        of_video = self.head.register_forward_pre_hook(lambda _head, given: (given[0][..., : self.dim], *given[1:]))
        with of_both, of_video:
            return forward()

    def rope_encode_pose(self, t, h, w, w_patches, **named):
        """Rotary embedding of the pose: for as many frames as the video has, at the same times, to the right of the
        video."""
        beside = {"rope_options": {"shift_x": float(w_patches)}}
        return self.rope_encode(t, h, w, transformer_options=beside, **named)

    def _time(self, t, dtype):
        """Modulation [B, 1, 6, D] of timestep 1, for every entry of t [B]."""
        sinusoidal = module_global(self.native, "sinusoidal_embedding_1d")
        e = self.time_embedding(sinusoidal(self.freq_dim, torch.ones_like(t.flatten())).to(dtype))
        return self.time_projection(e.unflatten(0, (len(t), -1))).unflatten(2, (6, self.dim))

    def _text(self, context, image):
        """(text tokens after the image's tokens [B, T, D], number of the image's tokens). None: there is no image."""
        text = self.text_embedding(context)
        if image is None:
            return text, None
        if self.img_emb is not None:
            text = torch.cat((self.img_emb(image), text), dim=1)
        return text, image.shape[-2]


class Animate2Block(Form):
    """Wan Animate 2's block, which runs both streams. They are side by side in its tokens' channels."""

    def forward(self, x, e, freqs, context, context_img_len=None, transformer_options=None):
        options = dict(transformer_options or {})
        factors, rule, pose = options.pop(BESIDE, Beside())
        given = [Stream(e, freqs, context, context_img_len), *([] if pose is None else [pose])]
        streams, times = x.split(self.dim, dim=-1), [self._modulation(each.e, x) for each in given]
        tensors = [
            self.self_attn.qkv(torch.addcmul(time[0], self.norm1(stream), 1 + time[1]), each.freqs)
            for stream, time, each in zip(streams, times, given, strict=True)
        ]
        if factors is not None:
            tensors[0][2].mul_(factors)
        outs = self._attended(rule, *(torch.cat(each, dim=-1) for each in zip(*tensors, strict=True)))
        found = []
        for stream, time, out, each in zip(streams, times, outs, given, strict=True):
            stream = torch.addcmul(stream, self.self_attn.o(out), time[2])
            found.append(self._cross_attn_ffn(stream, time, each.context, each.context_img_len, options))
        return torch.cat(found, dim=-1)

    def _attended(self, rule, q_BSHE, k_BSHE, v_BSHE):
        """Attention output [B, S, H x D] of each stream."""
        if rule is None:
            q, k, v = (each.flatten(2) for each in (q_BSHE, k_BSHE, v_BSHE))
            return [module_global(self.native, "optimized_attention")(q, k, v, heads=q_BSHE.shape[2])]
        return [out.flatten(2) for out in attention_by_rows(rule, q_BSHE, k_BSHE, v_BSHE).chunk(2, dim=-1)]


def animate2_arguments(arguments: Mapping[str, Any], _native: Any, _sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments, with a frame for the character before the pose's. Pose and latent then have the same frames."""
    pose = arguments.get("pose_latents")
    return dict(arguments) if pose is None else {**arguments, "pose_latents": F.pad(pose, (0, 0, 0, 0, 1, 0))}
