"""Qwen-Image 2.1's transformer on tokens, with the parameters of diffusers' QwenImage21Transformer2DModel.

The prefix is the text with the reference pictures between its words. It is modulated for time 0 and sees no token of the
picture that is made, so its keys and values do not depend on the sampler's step. As in ComfyUI's class
(comfy/ldm/qwen_image21), the timestep is rounded to the compute dtype and rotary embedding is computed in float32.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from . import fused
from .dispatched_attention import DispatchedAttention

Vectors = tuple[torch.Tensor, torch.Tensor]
"""A scale or a gate of the prefix [1, 1, hidden], at time 0, and of the picture [b, 1, hidden]."""


@dataclass(frozen=True)
class Modulation:
    """One for all blocks."""

    scale: Vectors
    """Of attention's input."""
    gate: Vectors
    scale_ff: Vectors
    """Of the feed-forward's input."""
    gate_ff: Vectors
    no_shift: torch.Tensor
    """[1, 1, hidden] of zeros, which kernels for a scale and a shift read."""
    prefix: int
    """How many tokens have the first vectors."""

    def modulated(self, norm: nn.LayerNorm, x: torch.Tensor, scales: Vectors) -> torch.Tensor:
        """norm(x) * (1 + scale): [b, s, hidden]."""
        at_zero, at_time = scales
        if not self.prefix:
            return fused.modulated(norm, x, at_time, self.no_shift)
        parts = (x[:, : self.prefix], at_zero), (x[:, self.prefix :], at_time)
        return torch.cat([fused.modulated(norm, each.contiguous(), scale, self.no_shift) for each, scale in parts], dim=1)

    def gated(self, x: torch.Tensor, gates: Vectors, out: torch.Tensor) -> torch.Tensor:
        """x + gate * out: [b, s, hidden]."""
        at_zero, at_time = gates
        if not self.prefix:
            return fused.gated(x, at_time, out)
        parts = (slice(0, self.prefix), at_zero), (slice(self.prefix, None), at_time)
        return torch.cat([fused.gated(x[:, part], gate, out[:, part]) for part, gate in parts], dim=1)


class TextNorm(nn.Module):
    """RMSNorm in float32, whose weight is its scale less 1."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float() + 1.0, self.eps).to(x.dtype)


class TextProjection(nn.Module):
    def __init__(self, text_width: int, width: int, eps: float):
        super().__init__()
        self.text_norm = TextNorm(text_width, eps)
        self.in_layer, self.out_layer = nn.Linear(text_width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(text)), approximate="tanh"))


class TimestepEmbedder(nn.Module):
    """The two layers of the time's embedding."""

    def __init__(self, frequencies: int, width: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(frequencies, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.silu(self.linear_1(waves)))


class TimeEmbedding(nn.Module):
    FREQUENCIES = 256

    def __init__(self, width: int):
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(self.FREQUENCIES, width)

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Times [b] float32 from 1, noise, to 0 -> [b + 1, width] in `dtype`: the last row is of time 0."""
        rounded = ((timestep * 1000).to(dtype) / 1000).to(dtype).float()
        times, half = F.pad(rounded, (0, 1)), self.FREQUENCIES // 2
        rates = torch.exp(-math.log(10000) / half * torch.arange(half, dtype=torch.float32, device=times.device))
        angles = 1000.0 * times[:, None] * rates
        return self.timestep_embedder(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype))


class Positions(nn.Module):
    """Rotary embedding of positions [s, 3] float32, each axis of which rotates its channels of a head."""

    def __init__(self, widths: tuple[int, ...], theta: float = 10000.0):
        super().__init__()
        self.widths, self.theta = widths, theta

    def forward(self, positions: torch.Tensor) -> fused.Rotation:
        """-> [1, s, 1, head size / 2, 2, 2]."""
        angles = []
        for axis, width in zip(positions.T, self.widths, strict=True):
            powers = torch.arange(0, width, 2, dtype=torch.float32, device=axis.device) / width
            angles.append(torch.outer(axis, 1 / self.theta**powers))
        joined = torch.cat(angles, dim=1)[None, :, None]
        return fused.rotation(joined.cos(), joined.sin())


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, head_size: int, eps: float):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, heads * head_size, bias=False) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(head_size, eps=eps) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(heads * head_size, width, bias=False)])
        self.processor = DispatchedAttention()

    def forward(self, x: torch.Tensor, rotary: fused.Rotation) -> torch.Tensor:
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        query, key = fused.normed_and_rotated(query, key, (self.norm_q, self.norm_k), rotary)
        return self.to_out[0](self.processor(query, key, value))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.proj, self.gate_layer = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.silu(self.gate_layer(x)) * self.proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, head_size: int, inner: int, eps: float):
        super().__init__()
        self.img_norm1, self.img_norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=eps) for _ in range(2))
        self.attn, self.img_mlp = Attention(width, heads, head_size, eps), FeedForward(width, inner)

    def forward(self, hidden_states: torch.Tensor, modulation: Modulation, rotary: fused.Rotation) -> torch.Tensor:
        """[b, s, hidden] -> the same shape."""
        x, by = hidden_states, modulation
        x = by.gated(x, by.gate, self.attn(by.modulated(self.img_norm1, x, by.scale), rotary))
        return by.gated(x, by.gate_ff, self.img_mlp(by.modulated(self.img_norm2, x, by.scale_ff)))


class OutputNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=eps)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        scale = self.linear(F.silu(temb))[:, None]
        return fused.modulated(self.norm, x, scale, torch.zeros_like(scale))


class QwenImage21Transformer2DModel(ModelMixin, ConfigMixin):  # type: ignore[misc]  # diffusers' bases disagree
    """Constructor arguments as diffusers' class of this name, whose `patch_size` is 1 and `causal_condition` true, and
    `fused_mlp`: the file has the two first layers of a feed-forward as one, which are two here."""

    @register_to_config
    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        out_channels: int = 64,
        num_layers: int = 32,
        attention_head_dim: int = 128,
        num_attention_heads: int = 32,
        context_in_dim: int = 4096,
        mlp_ratio: int = 3,
        axes_dims_rope: tuple[int, ...] = (16, 56, 56),
        eps: float = 1e-6,
        causal_condition: bool = True,
        fused_mlp: bool = False,
    ):
        super().__init__()
        width = num_attention_heads * attention_head_dim
        sizes = (width, num_attention_heads, attention_head_dim, mlp_ratio * width, eps)
        self.pos_embed = Positions(tuple(axes_dims_rope))
        self.time_text_embed = TimeEmbedding(width)
        self.txt_in = TextProjection(context_in_dim, width, eps)
        self.img_in = nn.Linear(in_channels, width, bias=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 4 * width, bias=False))
        self.transformer_blocks = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.norm_out = OutputNorm(width, eps)
        self.proj_out = nn.Linear(width, out_channels, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        references: torch.Tensor | None,
        places: torch.Tensor | None,
        timestep: torch.Tensor,
        positions: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Picture [b, n, C], text [b, t, w], references [b, r, C], time [b] float32 -> velocity [b, n, C].

        `places` [p] int64: the prefix's tokens, each by its number among the text's tokens and then the references'. None:
        the text's, in their order. `positions` [p + n, 3] float32 of the prefix's tokens, then of the picture's.
        """
        temb = self.time_text_embed(timestep, hidden_states.dtype)
        scale, gate, scale_ff, gate_ff = (
            (vectors[-1:, None], vectors[:-1, None]) for vectors in self.modulation(temb).chunk(4, dim=-1)
        )
        gate, gate_ff = ((at_zero.tanh(), at_time.tanh()) for at_zero, at_time in (gate, gate_ff))
        prefix = len(positions) - hidden_states.shape[1]
        modulation = Modulation(scale, gate, scale_ff, gate_ff, torch.zeros_like(scale[0]), prefix)
        parts = [self.img_in(hidden_states)]
        if prefix:
            words = [self.txt_in(encoder_hidden_states)] + ([] if references is None else [self.img_in(references)])
            tokens = torch.cat(words, dim=1)
            parts.insert(0, tokens if places is None else tokens[:, places])
        rotary = self.pos_embed(positions)
        joint = torch.cat(parts, dim=1)
        for block in self.transformer_blocks:
            joint = block(joint, modulation, rotary)
        return (self.proj_out(self.norm_out(joint[:, prefix:], temb[:-1])),)
