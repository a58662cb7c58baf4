"""SeedVR2's model, blocks and attention in a form that ranks can cut.

The class puts the tokens of all batch entries in one row, and attends window by window. Here tokens keep the video's order,
[B, N, D], and a rule says which tokens see each other. Each entry has its own text. In a batch with texts of equal length
the 3 B class gives the second entry the first one's text.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.device_copies import to_device
from parallel_backend.own_class.cuts.attention_calls import AttendAll, Rows, attention_by_rows, kept_with, module_global
from parallel_backend.own_class.cuts.forms import Form

CONDITION = "condition"
"""Argument: the video to upscale [B, 17, T, H, W], as latents and a mask."""


def seedvr2_arguments(arguments: Mapping[str, Any], _native: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the call's arguments. Raises ValueError, with the node to use, if the condition does not fit a latent of these
    sizes."""
    given = arguments.get(CONDITION)
    if given is None:
        raise ValueError(
            "positive, negative: SeedVR2 needs the video to upscale. Connect an Apply SeedVR2 Conditioning node."
        )
    if tuple(given.shape[2:]) != sizes:
        raise ValueError(
            f"latent_image: its {shown(sizes)} are not the {shown(given.shape[2:])} of the conditioning. Connect the latent "
            "that Apply SeedVR2 Conditioning has."
        )
    if any(size % 2 for size in sizes[1:]):
        raise ValueError(
            f"latent_image: SeedVR2 needs even numbers of latent rows and columns, not {sizes[1]} x {sizes[2]}. Use the "
            "SeedVR2 Preprocess node."
        )
    return dict(arguments)


def shown(sizes: Sequence[int]) -> str:
    """Return a latent's sizes as text for a message."""
    return f"{' x '.join(map(str, sizes))} latent frames, rows and columns"


class Grouped(NamedTuple):
    """Rows of a tensor, ordered by window."""

    rows: torch.Tensor
    """[n] int64: for each window its rows of the video, then all rows of the text."""
    counts: tuple[int, ...]
    """For each window, how many of `rows` it has."""
    video: torch.Tensor
    """[v] int64: rows of the video, window by window."""
    text: torch.Tensor
    """[t] int64: rows of the text."""


@dataclass(frozen=True)
class InWindows:
    """RowRule in which a video token sees its window and the text. A text token, which comes after the video's tokens,
    attends in every window; its output is the mean."""

    sides: tuple[tuple[int, ...], ...]
    """Lengths of the windows along frames, rows and columns, in tokens."""

    def __call__(self, attend: AttendAll, rows: Rows) -> torch.Tensor:
        q_BQHD, k_BKHD, v_BKHD, queries_Q, keys_K = rows
        queries, keys = (
            kept_with(numbers, (self, q_BQHD.device), functools.partial(self.grouped, numbers, q_BQHD.device))
            for numbers in (queries_Q, keys_K)
        )
        # One index for all windows: as many bytes as one for each, in a fraction of the kernels.
        parts = zip(
            q_BQHD[:, queries.rows].split(queries.counts, dim=1),
            *(each[:, keys.rows].split(keys.counts, dim=1) for each in (k_BKHD, v_BKHD)),
            strict=True,
        )
        outs = [attend(q_BqHD, k_BkHD, v_BkHD) for q_BqHD, k_BkHD, v_BkHD in parts if q_BqHD.shape[1]]
        words, out_BQHD = len(queries.text), torch.empty_like(q_BQHD)
        of_video, of_text = zip(*(out.split((out.shape[1] - words, words), dim=1) for out in outs), strict=True)
        out_BQHD[:, queries.video] = torch.cat(of_video, dim=1)
        if words:
            out_BQHD[:, queries.text] = torch.stack(of_text).mean(0)
        return out_BQHD

    def grouped(self, numbers: torch.Tensor, device: torch.device) -> Grouped:
        """Return the rows of the tokens with these numbers, ordered by window."""
        windows = self.windows()
        of_video, text = (numbers < len(windows)).nonzero()[:, 0], (numbers >= len(windows)).nonzero()[:, 0]
        of_video_w = windows[numbers[of_video]]
        counts = torch.bincount(of_video_w, minlength=math.prod(map(len, self.sides)))
        video = of_video[torch.argsort(of_video_w, stable=True)]
        rows = torch.cat([part for window in video.split(counts.tolist()) for part in (window, text)])
        on_device = (to_device(each, device) for each in (video, text))
        return Grouped(to_device(rows, device), tuple((counts + len(text)).tolist()), *on_device)

    def windows(self) -> torch.Tensor:
        """[N] int64: number of each token's window."""
        number = torch.zeros(1, dtype=torch.int64)
        for sides in self.sides:
            of_axis = torch.arange(len(sides)).repeat_interleave(torch.tensor(sides))
            number = (number[:, None] * len(sides) + of_axis).flatten()
        return number


@functools.lru_cache(maxsize=16)
def windows_of(way: Callable[..., Any], most: tuple[int, ...], grid: tuple[int, ...]) -> InWindows:
    """Return the rule for a video with `grid` tokens. `way`: the class's function that cuts it into windows. `most`: the
    approximate number of windows along each axis."""
    edges = [{(window[axis].start, window[axis].stop) for window in way(grid, most)} for axis in range(len(grid))]
    return InWindows(tuple(tuple(stop - start for start, stop in sorted(each)) for each in edges))


@functools.lru_cache(maxsize=16)
def places_of(rule: InWindows, of_pixels: bool, words: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (positions of the video's tokens in their windows [N, 3], positions of the text's tokens [words, 3]), float32.

    `of_pixels`: positions are between -1 and 1, and 0 for the text. Otherwise they are integers, and frames continue the
    text's numbers. The blocks of a call share the tensors."""
    with torch.inference_mode(False):  # a trial looks at what is written to
        line = functools.partial(torch.linspace, -1.0, 1.0) if of_pixels else torch.arange
        axes = [torch.cat([line(side).float() for side in sides]) for sides in rule.sides]
        numbers = torch.zeros(words) if of_pixels else torch.arange(words).float()
        if not of_pixels:
            axes[0] += words
        both = torch.cartesian_prod(*axes), numbers[:, None].expand(-1, 3).contiguous()
        video, text = (to_device(each, device) for each in both)
        return video, text


class Seedvr2Model(Form):
    """SeedVR2's model. Tokens [B, N, D] go through the blocks, together with the rule and positions of their windows."""

    def forward(self, x, timestep, context, condition, **_named):
        vid = as_one(self.vid_in, torch.cat((x, condition), dim=1))
        grid, vid, txt = tuple(vid.shape[1:4]), vid.flatten(1, 3), self.txt_in(context)
        words = txt.shape[1]  # between blocks ranks have a part of them
        emb = self.emb_in(timestep, device=vid.device, dtype=vid.dtype)
        for block in self.blocks:
            rule = windows_of(block.attn.window_op, block.attn.window, grid)
            places = places_of(rule, not block.attn.rope.mm, words, vid.device)
            vid, txt = block(vid, txt, emb, rule, *places)
        if self.vid_out_norm is not None:
            # The class adds its own shift and scale to those of attention.
            of_attention = emb.unflatten(1, (-1, 2, 3))[:, :, 0].flatten(1)
            vid = self.vid_out_ada(self.vid_out_norm(vid), emb=of_attention, layer="out", mode="in")
        return as_one(self.vid_out, vid.unflatten(1, grid))


def as_one(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a module for a batch of videos of equal size, by its parent class. The module itself takes videos
    in one row."""
    one: torch.Tensor = super(type(module), module).forward(x)  # type: ignore[misc]
    return one


class Seedvr2Block(Form):
    """SeedVR2's block: video tokens [B, N, D], text tokens [B, T, D], modulation [B, 6 D]. The class repeats the modulation
    for each token."""

    def forward(self, vid, txt, emb, rule, places, txt_places):
        modulated = functools.partial(self.ada, emb=emb)
        both = modulated(*self.attn_norm(vid, txt), layer="attn", mode="in")
        of_vid, of_txt = modulated(*self.attn(*both, rule, places, txt_places), layer="attn", mode="out")
        vid, txt = vid + of_vid, txt + of_txt
        both = modulated(*self.mlp_norm(vid, txt), layer="mlp", mode="in")
        of_vid, of_txt = modulated(*self.mlp(*both), layer="mlp", mode="out")
        return vid + of_vid, txt + of_txt


class Seedvr2Attention(Form):
    """SeedVR2's attention by a rule. The layers' width gives the number of heads, because a tensor rank has fewer."""

    def forward(self, vid, txt, rule, places, txt_places):
        of_vid, of_txt = (each.unflatten(-1, (3, -1, self.head_dim)).unbind(2) for each in self.proj_qkv(vid, txt))
        turns, rotated = self._turns(torch.cat((places, txt_places))), module_global(self.native, "apply_rope1")
        q, k = (
            rotated(torch.cat(norm(*both), dim=1).transpose(1, 2), turns).transpose(1, 2)
            for norm, both in zip((self.norm_q, self.norm_k), zip(of_vid, of_txt, strict=True), strict=False)
        )
        out = attention_by_rows(rule, q, k, torch.cat((of_vid[2], of_txt[2]), dim=1)).flatten(2)
        return self.proj_out(*out.split((vid.shape[1], txt.shape[1]), dim=1))

    def _turns(self, places_S3):
        """Rotary embedding [1, 1, S, head size / 2, 2, 2] float32 of positions [S, 3]. Channels without rotation have angle
        0."""
        rates = self.rope.rope.freqs
        if not self.rope.mm:  # the class makes them anew, whatever the file has
            most = module_global(self.native, "BYTEDANCE_ROPE_MAX_FREQ") / 2
            rates = torch.linspace(1.0, most, len(rates), device=rates.device) * math.pi
        angles = (places_S3[..., None] * rates).flatten(1)
        angles = F.pad(angles, (0, self.head_dim // 2 - angles.shape[1]))
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))[None, None]
