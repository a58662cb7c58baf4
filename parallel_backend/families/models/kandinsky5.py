"""Kandinsky 5's transformer on tokens, with the parameters of diffusers' Kandinsky5Transformer3DModel.

diffusers' class rounds rotated queries and keys to bf16 in every compute dtype, makes tables of all positions of a video,
and takes at most 128 token rows. This class computes as ComfyUI does (comfy/ldm/kandinsky5), in the dtype of its weights,
for any number of tokens with their positions. Sources: the technical report, arXiv 2511.14993, diffusers' and ComfyUI's
classes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from .dispatched_attention import DispatchedAttention, Rotary, rotary_pairs, rotated

THETA = 10000.0


def rates(count: int, device: torch.device) -> torch.Tensor:
    """[count] float32: radians per position, for each pair of channels."""
    return THETA ** (-torch.arange(count, device=device) / count)


class TimeEmbeddings(nn.Module):
    def __init__(self, width: int, time_dim: int):
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(width, time_dim), nn.Linear(time_dim, time_dim)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """[b] float32 -> [b, time_dim]."""
        angles = timestep[:, None] * rates(self.in_layer.in_features // 2, timestep.device)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.out_layer.bias.dtype)
        return self.out_layer(F.silu(self.in_layer(waves)))


def in_sequence(**layers: nn.Module) -> nn.Sequential:
    """Layers that run one after the other, with the names that the weights have."""
    return nn.Sequential(OrderedDict(layers))


def text_embeddings(text_dim: int, width: int) -> nn.Sequential:
    """[b, t, text_dim] -> [b, t, width]."""
    return in_sequence(in_layer=nn.Linear(text_dim, width), norm=nn.LayerNorm(width))


def modulation(time_dim: int, width: int, count: int) -> nn.Sequential:
    """[b, time_dim] -> [b, count x width]."""
    return in_sequence(activation=nn.SiLU(), out_layer=nn.Linear(time_dim, count * width))


def feed_forward(width: int, inner: int) -> nn.Sequential:
    """[b, n, width] -> [b, n, width]."""
    into, out = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
    return in_sequence(in_layer=into, activation=nn.GELU(), out_layer=out)


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.heads = width // head_dim
        self.to_query, self.to_key, self.to_value = (nn.Linear(width, width) for _ in range(3))
        self.query_norm, self.key_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.out_layer = nn.Linear(width, width)
        self.processor = DispatchedAttention()

    def forward(self, x: torch.Tensor, text: torch.Tensor | None = None, rotary: Rotary | None = None) -> torch.Tensor:
        """Attention over `x` itself, rotated, or over `text`. [b, n, width] -> the same shape."""
        others = x if text is None else text
        query = self.query_norm(self.to_query(x).unflatten(-1, (self.heads, -1)))
        key = self.key_norm(self.to_key(others).unflatten(-1, (self.heads, -1)))
        value = self.to_value(others).unflatten(-1, (self.heads, -1))
        if rotary is not None:
            query, key = rotated(query, rotary), rotated(key, rotary)
        return self.out_layer(self.processor(query, key, value))


def residual(
    x: torch.Tensor, norm: nn.Module, layer: Callable[[torch.Tensor], torch.Tensor], vectors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`x` plus the gated output of a layer over its modulated norm. `vectors`: shift, scale and gate [b, 1, width]."""
    shift, scale, gate = vectors
    return torch.addcmul(x, gate, layer(torch.addcmul(shift, norm(x), scale + 1)))


class EncoderBlock(nn.Module):
    """A block of the text: self-attention and feed-forward."""

    def __init__(self, width: int, time_dim: int, inner: int, head_dim: int):
        super().__init__()
        self.text_modulation = modulation(time_dim, width, 6)
        self.self_attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.self_attention = Attention(width, head_dim)
        self.feed_forward_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.feed_forward = feed_forward(width, inner)

    def forward(self, text: torch.Tensor, temb: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        vectors = self.text_modulation(temb).unsqueeze(1).chunk(6, dim=-1)
        text = residual(text, self.self_attention_norm, lambda x: self.self_attention(x, rotary=rotary), vectors[:3])
        return residual(text, self.feed_forward_norm, self.feed_forward, vectors[3:])


class DecoderBlock(nn.Module):
    """A block of the picture or video: self-attention, cross-attention to the text, feed-forward."""

    def __init__(self, width: int, time_dim: int, inner: int, head_dim: int):
        super().__init__()
        self.visual_modulation = modulation(time_dim, width, 9)
        self.self_attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.self_attention = Attention(width, head_dim)
        self.cross_attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.cross_attention = Attention(width, head_dim)
        self.feed_forward_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.feed_forward = feed_forward(width, inner)

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, temb: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        vectors = self.visual_modulation(temb).unsqueeze(1).chunk(9, dim=-1)
        x = residual(hidden_states, self.self_attention_norm, lambda x: self.self_attention(x, rotary=rotary), vectors[:3])
        x = residual(x, self.cross_attention_norm, lambda x: self.cross_attention(x, text), vectors[3:6])
        return residual(x, self.feed_forward_norm, self.feed_forward, vectors[6:])


class OutLayer(nn.Module):
    def __init__(self, width: int, time_dim: int, channels: int):
        super().__init__()
        self.modulation = modulation(time_dim, width, 2)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.out_layer = nn.Linear(width, channels)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(temb).unsqueeze(1).chunk(2, dim=-1)
        return self.out_layer(torch.addcmul(shift, self.norm(x), scale + 1))


class Kandinsky5Transformer3DModel(ModelMixin, ConfigMixin):
    """Constructor arguments as diffusers' class of this name. Tokens are patches of 1 x 2 x 2."""

    @register_to_config
    def __init__(
        self,
        in_visual_dim: int = 16,
        in_text_dim: int = 3584,
        in_text_dim2: int = 768,
        time_dim: int = 512,
        out_visual_dim: int = 16,
        patch_size: tuple[int, ...] = (1, 2, 2),
        model_dim: int = 1792,
        ff_dim: int = 7168,
        num_text_blocks: int = 2,
        num_visual_blocks: int = 32,
        axes_dims: tuple[int, ...] = (16, 24, 24),
        visual_cond: bool = False,
    ):
        super().__init__()
        sizes, patch = (model_dim, time_dim, ff_dim, sum(axes_dims)), torch.Size(patch_size).numel()
        self.time_embeddings = TimeEmbeddings(model_dim, time_dim)
        self.text_embeddings = text_embeddings(in_text_dim, model_dim)
        self.pooled_text_embeddings = text_embeddings(in_text_dim2, time_dim)
        channels = patch * (2 * in_visual_dim + 1 if visual_cond else in_visual_dim)
        self.visual_embeddings = in_sequence(in_layer=nn.Linear(channels, model_dim))
        self.text_transformer_blocks = nn.ModuleList(EncoderBlock(*sizes) for _ in range(num_text_blocks))
        self.visual_transformer_blocks = nn.ModuleList(DecoderBlock(*sizes) for _ in range(num_visual_blocks))
        self.out_layer = OutLayer(model_dim, time_dim, patch * out_visual_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        pooled_projections: torch.Tensor,
        positions: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """Tokens [b, n, 4 C], channels last; text [b, t, w] and pooled [b, w2]; time [b] float32; positions [n, 3] float32
        of frames, rows and columns -> tokens [b, n, 4 c], channels first.
        """
        device = timestep.device
        text = self.text_embeddings(encoder_hidden_states)
        temb = self.time_embeddings(timestep) + self.pooled_text_embeddings(pooled_projections)
        text_positions = torch.arange(text.shape[1], device=device)[:, None]
        rotary = rotary_pairs(text_positions * rates(sum(self.config["axes_dims"]) // 2, device))
        for block in self.text_transformer_blocks:
            text = block(text, temb, rotary)
        axes = zip(positions.T, self.config["axes_dims"], strict=True)
        angles = [axis[:, None] * rates(width // 2, device) for axis, width in axes]
        rotary = rotary_pairs(torch.cat(angles, dim=-1))
        hidden_states = self.visual_embeddings(hidden_states)
        for block in self.visual_transformer_blocks:
            hidden_states = block(hidden_states, text, temb, rotary)
        return (self.out_layer(hidden_states, temb),)
