"""SeedVR2's transformer on tokens, with the parameters of ComfyUI's NaDiT (comfy/ldm/seedvr/model.py; arXiv 2506.05301).

Attention is in windows of the video, which every other block shifts by half a window. The text is in every window. Two
kinds: the one with 3 B parameters rotates video and text by whole positions; that with 7 B rotates the video alone, by
places between -1 and 1 in the window.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.modeling_utils import ModelMixin
from einops import rearrange
from torch import nn

from .dispatched_attention import DispatchedAttention, Rotary, rotary_pairs, rotated

PATCH = (2, 2)
"""Rows and columns of a token."""
FREQUENCIES = 256
PIXELS = 128.0
"""Highest frequency of places between -1 and 1, in half turns."""
SHIFT, SCALE, GATE = range(3)
Both = tuple[torch.Tensor, torch.Tensor]
"""Of the video [b, n, ...] and of the text [b, t, ...]."""


class Streams(nn.Module):
    """A module for the video and one for the text, or one for both."""

    def __init__(self, make: Callable[[], nn.Module], shared: bool, with_text: bool = True):
        """`with_text`: False where the text goes by unchanged."""
        super().__init__()
        self.with_text = with_text
        if shared:
            self.all = make()
        else:
            self.vid = make()
            if with_text:
                self.txt = make()

    def forward(self, video: torch.Tensor, text: torch.Tensor, *more: object) -> Both:
        shared = getattr(self, "all", None)
        video = (shared or self.vid)(video, *more)
        return video, (shared or self.txt)(text, *more) if self.with_text else text


class Modulation(nn.Module):
    """A block's own shifts, scales and gates, which are added to those of the time."""

    def __init__(self, width: int):
        super().__init__()
        for name in (f"{part}_{kind}" for part in ("attn", "mlp") for kind in ("shift", "scale", "gate")):
            self.register_parameter(name, nn.Parameter(torch.zeros(width)))

    def forward(self, x: torch.Tensor, of_time: torch.Tensor, part: str, gate: bool) -> torch.Tensor:
        """`x` [b, n, width] scaled and shifted, or by the gate. `of_time` [b, width, 2, 3]: of "attn", "mlp"."""
        shift, scale, factor = of_time[:, None, :, ("attn", "mlp").index(part)].unbind(-1)
        own = {kind: getattr(self, f"{part}_{kind}").to(x.dtype) for kind in ("shift", "scale", "gate")}
        if gate:
            return x * (factor + own["gate"])
        return x * (scale + own["scale"]) + (shift + own["shift"])


class OutputModulation(nn.Module):
    """Shift and scale in front of the last layer, which are added to those that the time has for attention."""

    def __init__(self, width: int):
        super().__init__()
        self.out_shift, self.out_scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, of_time: torch.Tensor) -> torch.Tensor:
        shift, scale, _ = of_time[:, None, :, 0].unbind(-1)
        return x * (scale + self.out_scale.to(x.dtype)) + (shift + self.out_shift.to(x.dtype))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, gated: bool):
        super().__init__()
        if gated:
            self.proj_in_gate = nn.Linear(width, inner, bias=False)
        self.gated = gated
        self.proj_in, self.proj_out = nn.Linear(width, inner, bias=not gated), nn.Linear(inner, width, bias=not gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.proj_out(F.silu(self.proj_in_gate(x)) * self.proj_in(x))
        return self.proj_out(F.gelu(self.proj_in(x), approximate="tanh"))


class WindowAttention(nn.Module):
    """Attention WINDOWS (base/blocks.py). It needs a parallel attention, which knows the windows."""

    def __init__(self, width: int, heads: int, head_size: int, eps: float, shared: bool):
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.proj_qkv = Streams(lambda: nn.Linear(width, 3 * heads * head_size, bias=False), shared)
        self.proj_out = Streams(lambda: nn.Linear(heads * head_size, width), shared)
        self.norm_q, self.norm_k = (Streams(lambda: nn.RMSNorm(head_size, eps=eps), shared) for _ in range(2))
        self.processor = DispatchedAttention()

    def forward(self, video: torch.Tensor, text: torch.Tensor, rotary: Rotary) -> Both:
        video_qkv, text_qkv = (x.unflatten(-1, (3, -1, self.head_size)).unbind(2) for x in self.proj_qkv(video, text))
        query, key = (
            rotated(torch.cat(norm(video_qkv[i], text_qkv[i]), dim=1), rotary)
            for i, norm in enumerate((self.norm_q, self.norm_k))
        )
        out = self.processor(query, key, torch.cat((video_qkv[2], text_qkv[2]), dim=1))
        return self.proj_out(*out.split((video.shape[1], text.shape[1]), dim=1))


class Block(nn.Module):
    def __init__(
        self, width: int, heads: int, head_size: int, inner: int, gated: bool, eps: float, shared: bool, text_ends: bool
    ):
        """`text_ends`: only attention looks at the text, which the block leaves as it is."""
        super().__init__()
        self.text_ends, self.eps = text_ends, eps
        self.attn = WindowAttention(width, heads, head_size, eps, shared)
        self.mlp = Streams(lambda: FeedForward(width, inner, gated), shared, not text_ends)
        self.ada = Streams(lambda: Modulation(width), shared, not text_ends)

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, of_time: torch.Tensor, rotary: Rotary
    ) -> Both:
        """Video [b, n, width] and text [b, t, width] -> the same shapes. `of_time`: see Modulation. `rotary`: of n + t."""
        video, text = hidden_states, encoder_hidden_states
        of_video, of_text = self.ada(self._norm(video), self._norm(text), of_time, "attn", False)
        of_video, of_text = self.ada(*self.attn(of_video, of_text, rotary), of_time, "attn", True)
        video = video + of_video
        if not self.text_ends:
            text = text + of_text
        of_video, of_text = self.ada(self._norm(video), self._norm(text), of_time, "mlp", False)
        of_video, of_text = self.ada(*self.mlp(of_video, of_text), of_time, "mlp", True)
        return video + of_video, text if self.text_ends else text + of_text

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj_in, self.proj_hid = nn.Linear(FREQUENCIES, width), nn.Linear(width, width)
        self.proj_out = nn.Linear(width, 6 * width)

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Times [b] of 0 ... 1000 -> [b, width, 2, 3]: shift, scale and gate of attention and of the feed-forward."""
        waves = get_timestep_embedding(timestep.float(), FREQUENCIES, downscale_freq_shift=0).to(dtype)
        hidden = F.silu(self.proj_hid(F.silu(self.proj_in(waves))))
        return self.proj_out(hidden).unflatten(-1, (-1, 2, 3))


class Positions(nn.Module):
    """Rotary embedding of places in windows."""

    def __init__(self, head_size: int, frequencies: int, pixels: bool, stored: bool):
        super().__init__()
        self.head_size, self.frequencies, self.pixels = head_size, frequencies, pixels
        # Those of the file are used: in fp16 they are others than the formula gives, and ComfyUI reads them too.
        self.freqs = nn.Parameter(_frequencies(frequencies), requires_grad=False) if stored else None

    def forward(self, places: torch.Tensor, text_places: torch.Tensor, text_tokens: int) -> list[Rotary]:
        """For each way to cut windows: cosines and sines [n + t, head size], float32.

        `places` [n, ways, 2, 3]: frame, row and column in the window, then the window's numbers of them. `text_places` [t].
        """
        if self.pixels:
            rates = torch.linspace(1, PIXELS, self.frequencies, device=places.device) * math.pi
            at, sizes = places.unbind(2)
            at = torch.where(sizes > 1, 2 * at / (sizes - 1).clamp_min(1) - 1, -1.0)
            of_text = at.new_zeros(len(text_places), 3)
        else:
            stored = self.freqs
            rates = _frequencies(self.frequencies).to(places.device) if stored is None else stored.float()
            at = places[:, :, 0].clone()
            at[..., 0] += text_tokens
            of_text = text_places[:, None].expand(-1, 3)
        rest = self.head_size // 2 - 3 * len(rates)  # channels that are not rotated
        return [
            rotary_pairs(F.pad((torch.cat((each, of_text))[..., None] * rates).flatten(1), (0, rest)))
            for each in at.unbind(1)
        ]


def _frequencies(count: int) -> torch.Tensor:
    return 1 / 10000 ** (torch.arange(count, dtype=torch.float32) / count)


class PatchIn(nn.Module):
    def __init__(self, channels: int, width: int):
        super().__init__()
        self.proj = nn.Linear(math.prod(PATCH) * channels, width)

    def forward(self, tokens: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Tokens [b, n, c x rows x columns], also of the video that is given -> [b, n, width]."""
        parts = [each.unflatten(-1, (-1, math.prod(PATCH))).transpose(2, 3) for each in (tokens, condition)]
        return self.proj(torch.cat(parts, dim=-1).flatten(2))


class PatchOut(nn.Module):
    def __init__(self, width: int, channels: int):
        super().__init__()
        self.proj = nn.Linear(width, math.prod(PATCH) * channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, n, width] -> tokens [b, n, c x rows x columns]."""
        return rearrange(self.proj(x), "b n (p c) -> b n (c p)", p=math.prod(PATCH))


class SeedVR2Transformer3DModel(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(
        self,
        in_channels: int = 33,
        out_channels: int = 16,
        num_layers: int = 32,
        num_attention_heads: int = 20,
        attention_head_dim: int = 128,
        text_dim: int = 5120,
        ffn_dim: int = 6912,
        gated: bool = True,
        separate_layers: int = 10,
        rope_frequencies: int = 21,
        pixel_rope: bool = False,
        stored_rope: bool = True,
    ):
        """`separate_layers`: first blocks with weights for the text apart. `pixel_rope`: the kind with 7 B parameters.
        `stored_rope`: the file has the rotary frequencies."""
        super().__init__()
        width, eps = num_attention_heads * attention_head_dim, 1e-5
        self.vid_in, self.txt_in = PatchIn(in_channels, width), nn.Linear(text_dim, width)
        self.emb_in = TimeEmbedding(width)
        self.rope = Positions(attention_head_dim, rope_frequencies, pixel_rope, stored_rope)
        self.blocks = nn.ModuleList(
            Block(
                *(width, num_attention_heads, attention_head_dim, ffn_dim, gated, eps),
                shared=index >= separate_layers,
                text_ends=index == num_layers - 1 and not pixel_rope,
            )
            for index in range(num_layers)
        )
        self.vid_out_norm = None if pixel_rope else nn.RMSNorm(width, eps=eps)
        self.vid_out_ada = None if pixel_rope else OutputModulation(width)
        self.vid_out = PatchOut(width, out_channels)

    def forward(
        self,
        hidden_states: torch.Tensor,
        condition: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        places: torch.Tensor,
        text_places: torch.Tensor,
        text_tokens: int,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Tokens [b, n, out_channels x 4], and of the video that is given [b, n, (in_channels - out_channels) x 4], text
        [b, t, text_dim], timestep [b] -> ([b, n, out_channels x 4],). `text_tokens`: of all ranks. The others: Positions."""
        assert not return_dict
        video = self.vid_in(hidden_states, condition.to(hidden_states.dtype))
        text, of_time = self.txt_in(encoder_hidden_states), self.emb_in(timestep, video.dtype)
        tables = self.rope(places, text_places, text_tokens)
        for index, block in enumerate(self.blocks):
            video, text = block(video, text, of_time, tables[index % len(tables)])
        if self.vid_out_norm is not None and self.vid_out_ada is not None:
            video = self.vid_out_ada(self.vid_out_norm(video), of_time)
        return (self.vid_out(video),)
