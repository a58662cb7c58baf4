"""Ideogram 4's transformer on tokens of text and picture, with the parameters of diffusers' Ideogram4Transformer2DModel.

diffusers' class takes text and picture packed into one sequence, with a mask of all tokens by all tokens, and rounds the
rotary tables to the compute dtype. This class takes them separately, has no mask, and rotates in float32, as ComfyUI does
(comfy/ldm/ideogram4): positions beyond IMAGE_POSITION need it.
"""

import math

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from .dispatched_attention import DispatchedAttention, Rotary

IMAGE_POSITION = 65536
"""Position of a picture's first token on every axis. The text's positions begin at 0."""


def rotated_halves(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """[B, s, H, D] -> the same shape. Channels i and i + D / 2 are a pair. `rotary`: cosines and sines [s, D / 2]."""
    cos, sin = (table[:, None] for table in rotary)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(width // heads, eps=1e-5) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(width, width, bias=False)])
        self.processor = DispatchedAttention()

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        query, key = rotated_halves(self.norm_q(query), rotary), rotated_halves(self.norm_k(key), rotary)
        return self.to_out[0](self.processor(query, key, value))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, eps: float, adaln_dim: int):
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width, inner)
        self.attention_norm1, self.attention_norm2 = (nn.RMSNorm(width, eps=eps) for _ in range(2))
        self.ffn_norm1, self.ffn_norm2 = (nn.RMSNorm(width, eps=eps) for _ in range(2))
        self.adaln_modulation = nn.Linear(adaln_dim, 4 * width)

    def forward(self, hidden_states: torch.Tensor, rotary: Rotary, temb: torch.Tensor) -> torch.Tensor:
        scale, gate, scale_ff, gate_ff = self.adaln_modulation(temb).chunk(4, dim=-1)
        x = hidden_states
        x = x + gate.tanh() * self.attention_norm2(self.attention(self.attention_norm1(x) * (1 + scale), rotary))
        return x + gate_ff.tanh() * self.ffn_norm2(self.feed_forward(self.ffn_norm1(x) * (1 + scale_ff)))


class TimeEmbedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp_in, self.mlp_out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        """Times [b] from 0, noise, to 1, float32 -> [b, width]."""
        half = self.mlp_in.in_features // 2
        rates = torch.exp(torch.arange(half, device=time.device) * (-math.log(1e4) / (half - 1)))
        angles = 1e4 * time[:, None] * rates
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1).to(self.mlp_in.bias.dtype)
        return self.mlp_out(F.silu(self.mlp_in(waves)))


class FinalLayer(nn.Module):
    def __init__(self, width: int, channels: int, adaln_dim: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear, self.adaln_modulation = nn.Linear(width, channels), nn.Linear(adaln_dim, width)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm_final(x) * (1 + self.adaln_modulation(F.silu(temb))))


class Ideogram4Transformer2DModel(ModelMixin, ConfigMixin):
    """Constructor arguments as diffusers' class of this name."""

    @register_to_config
    def __init__(
        self,
        in_channels: int = 128,
        num_layers: int = 34,
        attention_head_dim: int = 256,
        num_attention_heads: int = 18,
        intermediate_size: int = 12288,
        adaln_dim: int = 512,
        llm_features_dim: int = 53248,
        rope_theta: int = 5_000_000,
        mrope_section: tuple[int, ...] = (24, 20, 20),
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        width = attention_head_dim * num_attention_heads
        sizes = (width, intermediate_size, num_attention_heads, norm_eps, adaln_dim)
        self.input_proj = nn.Linear(in_channels, width)
        self.llm_cond_norm = nn.RMSNorm(llm_features_dim, eps=1e-6)
        self.llm_cond_proj = nn.Linear(llm_features_dim, width)
        self.t_embedding = TimeEmbedding(width)
        self.adaln_proj = nn.Linear(width, adaln_dim)
        self.embed_image_indicator = nn.Embedding(2, width)
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.final_layer = FinalLayer(width, in_channels, adaln_dim)

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Positions [s, 3] float32 -> cosines and sines [s, D / 2].

        Each pair of channels rotates by one axis. Pairs 1, 4, 7 ... take axis 1 and pairs 2, 5, 8 ... axis 2, within the
        length of the axis's section; all others take axis 0.
        """
        size, device = self.config["attention_head_dim"], positions.device
        pairs = torch.arange(size // 2, device=device)
        rates = 1 / self.config["rope_theta"] ** (2.0 * pairs / size)  # as in ComfyUI: at such positions rounding shows
        angles = positions[:, :1] * rates
        for axis in (1, 2):
            counts = (pairs % 3 == axis) & (pairs < 3 * self.config["mrope_section"][axis])
            angles = torch.where(counts, positions[:, axis, None] * rates, angles)
        return angles.cos(), angles.sin()

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        image_positions: torch.Tensor,
        text_positions: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Picture [b, n, C], time [b] float32 from noise (0) to picture (1), text [b, t, w], which may be empty; positions
        [n, 2] float32 of rows and columns, and [t] -> velocity [b, n, C].
        """
        temb = F.silu(self.adaln_proj(self.t_embedding(timestep))).unsqueeze(1)
        kinds = self.embed_image_indicator.weight
        image = self.input_proj(hidden_states) + kinds[1]
        text = self.llm_cond_proj(self.llm_cond_norm(encoder_hidden_states)) + kinds[0]
        positions = F.pad(image_positions, (1, 0)) + float(IMAGE_POSITION)
        rotary = self.rotary(torch.cat((text_positions[:, None].expand(-1, 3), positions)))
        joint = torch.cat((text, image), dim=1)
        for block in self.layers:
            joint = block(joint, rotary, temb)
        return (self.final_layer(joint, temb)[:, text.shape[1] :],)
