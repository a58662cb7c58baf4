"""The bundled model's class: a plain diffusion transformer in the form of ComfyUI's classes, and an example of a class that
ranks can run. Its arithmetic and the names of its tensors are FLUX.1's.

Ranks need of a class: blocks in an nn.ModuleList, layers made by `operations`, and a call of this room's `attention`.
Nothing here knows of ranks. A trial (own_class/trials/trial.py) finds how to split the class over ranks.

B batch, T text tokens, N image tokens, S = T + N, H heads, D features of a head, W = H x D.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention import attention

PATCH = 2
"""Number of latent rows and of latent columns per token."""
TIME_FEATURES, TIME_FACTOR, MAX_PERIOD = 256, 1000.0, 10000.0
THETA, EPS, MLP_RATIO = 10000.0, 1e-6, 4


class MiniFlux(nn.Module):
    """Latent [B, C, h, w], times [B] in 0..1, text [B, T, c] and its summary `pooled` [B, v] -> velocity like the latent."""

    def __init__(
        self,
        operations: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        channels: int = 16,
        context_width: int = 32,
        pooled_width: int = 16,
        width: int = 256,
        axes: Sequence[int] = (16, 56, 56),
        double_blocks: int = 1,
        single_blocks: int = 4,
        guidance: bool = False,
    ):
        """`axes`: for each axis of positions, its number of features of a head. Their sum is the head's size."""
        super().__init__()
        made = {"operations": operations, "dtype": dtype, "device": device}
        linear = {"dtype": dtype, "device": device}
        head_size, self.axes = sum(axes), axes
        self.img_in = operations.Linear(channels * PATCH**2, width, **linear)
        self.txt_in = operations.Linear(context_width, width, **linear)
        self.time_in = Embedder(TIME_FEATURES, width, **made)
        self.vector_in = Embedder(pooled_width, width, **made)
        self.guidance_in = Embedder(TIME_FEATURES, width, **made) if guidance else None
        self.double_blocks = nn.ModuleList(DoubleBlock(width, head_size, **made) for _ in range(double_blocks))
        self.single_blocks = nn.ModuleList(SingleBlock(width, head_size, **made) for _ in range(single_blocks))
        self.final_layer = FinalLayer(width, channels * PATCH**2, **made)

    def forward(self, x, timestep, context, pooled, guidance=None, transformer_options=None, **_others):
        """`guidance` [B]: for a model that embeds it."""
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % PATCH, 0, -height % PATCH), mode="circular")
        rows, columns = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        patches = x.unflatten(3, (columns, PATCH)).unflatten(2, (rows, PATCH)).permute(0, 2, 4, 1, 3, 5)
        img_BNW, txt_BTW = self.img_in(patches.flatten(3).flatten(1, 2)), self.txt_in(context.to(x.dtype))
        vec_BW = self.time_in(self._sines(timestep, x.dtype)) + self.vector_in(pooled.to(x.dtype))
        if self.guidance_in is not None:
            vec_BW = vec_BW + self.guidance_in(self._sines(guidance, x.dtype))
        text = context.shape[1]
        rope_S = rotations(places(rows, columns, text, x.device), self.axes)
        for block in self.double_blocks:
            img_BNW, txt_BTW = block(img_BNW, txt_BTW, vec_BW, rope_S)
        both_BSW = torch.cat((txt_BTW, img_BNW), dim=1)
        for block in self.single_blocks:
            both_BSW = block(both_BSW, vec_BW, rope_S)
        out = self.final_layer(both_BSW[:, text:], vec_BW)
        out = out.unflatten(2, (-1, PATCH, PATCH)).unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
        return out.flatten(4).flatten(2, 3)[:, :, :height, :width]

    def _sines(self, times_B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return sines(TIME_FACTOR * times_B.float(), TIME_FEATURES).to(dtype)


class DoubleBlock(nn.Module):
    """A block of two streams of tokens, image and text, that attend to each other."""

    def __init__(self, width: int, head_size: int, **made: Any):
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(width, 6, **made), Modulation(width, 6, **made)
        self.img_attn, self.txt_attn = SelfAttention(width, head_size, **made), SelfAttention(width, head_size, **made)
        self.img_mlp, self.txt_mlp = mlp(width, **made), mlp(width, **made)

    def forward(self, img_BNW, txt_BTW, vec_BW, rope_S):
        img_mod, txt_mod = self.img_mod(vec_BW), self.txt_mod(vec_BW)
        img_heads, txt_heads = self.img_attn(img_BNW, img_mod), self.txt_attn(txt_BTW, txt_mod)
        q, k, v = (torch.cat(both, dim=2) for both in zip(txt_heads, img_heads, strict=True))
        out_BSW = attention(rotated(q, rope_S), rotated(k, rope_S), v, q.shape[1], skip_reshape=True)
        txt_out, img_out = out_BSW.split([txt_BTW.shape[1], img_BNW.shape[1]], dim=1)
        img_BNW = fed(img_BNW, self.img_attn.proj(img_out), self.img_mlp, img_mod)
        return img_BNW, fed(txt_BTW, self.txt_attn.proj(txt_out), self.txt_mlp, txt_mod)


class SingleBlock(nn.Module):
    """A block of one stream, [text, image]. Attention and feed-forward run in parallel between two shared layers."""

    def __init__(self, width: int, head_size: int, operations: Any, **where: Any):
        super().__init__()
        hidden = MLP_RATIO * width
        self.linear1 = operations.Linear(width, 3 * width + hidden, **where)
        self.linear2 = operations.Linear(width + hidden, width, **where)
        self.norm = HeadNorms(head_size, **where)
        self.modulation = Modulation(width, 3, operations=operations, **where)
        self.heads, self.head_size = width // head_size, head_size

    def forward(self, both_BSW, vec_BW, rope_S):
        shift, scale, gate = self.modulation(vec_BW)
        attended = 3 * self.heads * self.head_size
        joined = self.linear1(normed(both_BSW, shift, scale))
        q, k, v = joined[..., :attended].unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.norm(q, k)
        out_BSW = attention(rotated(q, rope_S), rotated(k, rope_S), v, self.heads, skip_reshape=True)
        hidden = F.gelu(joined[..., attended:], approximate="tanh")
        return both_BSW + gate * self.linear2(torch.cat((out_BSW, hidden), dim=2))


class SelfAttention(nn.Module):
    """The layers before and after attention for one of the two streams, image or text."""

    def __init__(self, width: int, head_size: int, operations: Any, **where: Any):
        super().__init__()
        self.qkv = operations.Linear(width, 3 * width, **where)
        self.norm = HeadNorms(head_size, **where)
        self.proj = operations.Linear(width, width, **where)
        self.heads = width // head_size

    def forward(self, x_BSW, modulation):
        """Return the queries, keys and values of the stream, [B, H, S, D] each."""
        shift, scale, *_ = modulation
        qkv = self.qkv(normed(x_BSW, shift, scale))
        q, k, v = qkv.view(*x_BSW.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return *self.norm(q, k), v


class HeadNorms(nn.Module):
    """Norms of queries and keys over the features of each head."""

    def __init__(self, head_size: int, **where: Any):
        super().__init__()
        self.query_norm, self.key_norm = Scale(head_size, **where), Scale(head_size, **where)

    def forward(self, q, k):
        return self.query_norm(q), self.key_norm(k)


class Scale(nn.Module):
    """An RMS norm whose parameter has the name that the file uses."""

    def __init__(self, size: int, **where: Any):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size, **where))

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, self.scale, EPS)


class Modulation(nn.Module):
    """Computes `parts` tensors [B, 1, W] for scale, shift and gate from a vector [B, W]."""

    def __init__(self, width: int, parts: int, operations: Any, **where: Any):
        super().__init__()
        self.lin, self.parts = operations.Linear(width, parts * width, **where), parts

    def forward(self, vec_BW):
        return self.lin(F.silu(vec_BW))[:, None].chunk(self.parts, dim=-1)


class Embedder(nn.Module):
    """Embeds [B, features] as [B, W] with two layers."""

    def __init__(self, features: int, width: int, operations: Any, **where: Any):
        super().__init__()
        self.in_layer = operations.Linear(features, width, **where)
        self.out_layer = operations.Linear(width, width, **where)

    def forward(self, x):
        return self.out_layer(F.silu(self.in_layer(x)))


class FinalLayer(nn.Module):
    """Computes the output patches [B, N, C x PATCH x PATCH] from tokens [B, N, W]."""

    def __init__(self, width: int, features: int, operations: Any, **where: Any):
        super().__init__()
        self.linear = operations.Linear(width, features, **where)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, 2 * width, **where))

    def forward(self, x_BNW, vec_BW):
        shift, scale = self.adaLN_modulation(vec_BW)[:, None].chunk(2, dim=-1)
        return self.linear(normed(x_BNW, shift, scale))


def mlp(width: int, operations: Any, **where: Any) -> nn.Sequential:
    """Return the feed-forward layers of a stream."""
    hidden = MLP_RATIO * width
    layers = operations.Linear(width, hidden, **where), operations.Linear(hidden, width, **where)
    return nn.Sequential(layers[0], nn.GELU(approximate="tanh"), layers[1])


def normed(x_BSW: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the stream after a layer norm, scaled and shifted."""
    return torch.addcmul(shift, 1 + scale, F.layer_norm(x_BSW, x_BSW.shape[-1:], eps=EPS))


def fed(x_BSW: torch.Tensor, attended: torch.Tensor, feed: nn.Module, modulation: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one of the two streams after the outputs of attention, then of the feed-forward, were added to it."""
    _, _, gate, shift, scale, feed_gate = modulation
    x_BSW = x_BSW + gate * attended
    return x_BSW + feed_gate * feed(normed(x_BSW, shift, scale))


def sines(times_B: torch.Tensor, features: int) -> torch.Tensor:
    """Return cosines and sines of the times at all frequencies: [B] -> [B, features] float32."""
    half = features // 2
    rates = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=times_B.device) / half)
    angles = times_B.float()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def places(rows: int, columns: int, text: int, device: torch.device) -> torch.Tensor:
    """Return the positions [S, 3] float64 of tokens: (0, row, column) for the image, (0, 0, 0) for text."""
    places_S3 = torch.zeros(text + rows * columns, 3, dtype=torch.float64, device=device)
    places_S3[text:, 1] = torch.arange(rows, device=device).repeat_interleave(columns)
    places_S3[text:, 2] = torch.arange(columns, device=device).repeat(rows)
    return places_S3


def rotations(places_S3: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return cosines and sines [S, D / 2, 2] for tokens at these positions. `axes`: features of a head for each axis."""
    device = places_S3.device
    rates = [THETA ** -(torch.arange(0, size, 2, dtype=torch.float64, device=device) / size) for size in axes]
    angles = torch.cat([places_S3[:, axis, None] * rate for axis, rate in enumerate(rates)], dim=-1)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotated(x_BHSD: torch.Tensor, rope_S: torch.Tensor) -> torch.Tensor:
    """Return queries or keys with each pair of features rotated by the token's angle."""
    cos, sin = rope_S.unbind(-1)
    even, odd = x_BHSD.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x_BHSD.dtype)
