"""A class for videos in the form of ComfyUI's classes, as mini_flux.py is one for images. Its arithmetic and the names of
its tensors are Wan's. Benchmarks and tests of video run it where there is no ComfyUI.

B batch, T text tokens, S tokens by frames, rows, columns, D features of a head, W width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention import attention
from .mini_flux import EPS, normed, rotated, rotations, sines

PATCH = 2
"""Number of latent rows and of latent columns per token."""
HEAD, AXES = 128, (44, 42, 42)
"""The number of features of a head, and how many of them each axis of positions has."""


class MiniWan(nn.Module):
    """A video model. Takes a latent [B, C, F, h, w], times [B] in 0..1000 and text [B, T, c]; returns a velocity like the
    latent."""

    def __init__(
        self,
        operations: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        channels: int = 16,
        context_width: int = 16,
        width: int = 256,
        features: int = 256,
        hidden: int = 384,
        layers: int = 4,
    ):
        """`features`: of the embedding of a time. `hidden`: width of the feed-forward."""
        super().__init__()
        where = {"dtype": dtype, "device": device}
        linear, sides = operations.Linear, (1, PATCH, PATCH)
        self.features = features
        self.patch_embedding = operations.Conv3d(channels, width, kernel_size=sides, stride=sides, **where)
        self.text_embedding = nn.Sequential(linear(context_width, width, **where), gelu(), linear(width, width, **where))
        self.time_embedding = nn.Sequential(linear(features, width, **where), nn.SiLU(), linear(width, width, **where))
        self.time_projection = nn.Sequential(nn.SiLU(), linear(width, 6 * width, **where))
        self.blocks = nn.ModuleList(Block(width, hidden, operations, **where) for _ in range(layers))
        self.head = Head(width, channels * PATCH**2, operations, **where)

    def forward(self, x, timestep, context, transformer_options=None, **_others):
        rows, columns = x.shape[-2:]
        x = F.pad(x, (0, -columns % PATCH, 0, -rows % PATCH, 0, 0), mode="circular")
        embedded = self.patch_embedding(x)
        grid, x_BSW = embedded.shape[2:], embedded.flatten(2).transpose(1, 2)
        time_BW = self.time_embedding(sines(timestep, self.features).to(x.dtype))
        modulation, text_BTW = self.time_projection(time_BW).unflatten(-1, (6, -1)), self.text_embedding(context.to(x.dtype))
        places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float64, device=x.device) for count in grid))
        rope_S = rotations(places, AXES)
        for block in self.blocks:
            x_BSW = block(x_BSW, modulation, text_BTW, rope_S)
        patches = self.head(x_BSW, time_BW).unflatten(2, (PATCH, PATCH, -1)).unflatten(1, grid)
        return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)[..., :rows, :columns]


class Block(nn.Module):
    """A block in which tokens attend to all tokens, and then to the text."""

    def __init__(self, width: int, hidden: int, operations: Any, **where: Any):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(width, operations, **where), Attention(width, operations, **where)
        self.norm3 = operations.LayerNorm(width, eps=EPS, **where)
        self.ffn = nn.Sequential(
            operations.Linear(width, hidden, **where), gelu(), operations.Linear(hidden, width, **where)
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, width, **where))

    def forward(self, x_BSW, modulation, text_BTW, rope_S):
        shift, scale, gate, feed_shift, feed_scale, feed_gate = (self.modulation + modulation)[:, :, None].unbind(1)
        seen = normed(x_BSW, shift, scale)
        x_BSW = x_BSW + gate * self.self_attn(seen, seen, rope_S)
        x_BSW = x_BSW + self.cross_attn(self.norm3(x_BSW), text_BTW)
        return x_BSW + feed_gate * self.ffn(normed(x_BSW, feed_shift, feed_scale))


class Attention(nn.Module):
    """Attention whose norms are over the features of all heads."""

    def __init__(self, width: int, operations: Any, **where: Any):
        super().__init__()
        self.q, self.k, self.v, self.o = (operations.Linear(width, width, **where) for _ in range(4))
        self.norm_q, self.norm_k = (operations.RMSNorm(width, eps=EPS, **where) for _ in range(2))

    def forward(self, x_BSW, seen, rope_S=None):
        q, k, v = self.norm_q(self.q(x_BSW)), self.norm_k(self.k(seen)), self.v(seen)
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (q, k, v))
        if rope_S is not None:
            q, k = rotated(q, rope_S), rotated(k, rope_S)
        return self.o(attention(q, k, v, q.shape[1], skip_reshape=True))


class Head(nn.Module):
    """Computes the output patches [B, S, PATCH x PATCH x C] from tokens [B, S, W]."""

    def __init__(self, width: int, out: int, operations: Any, **where: Any):
        super().__init__()
        self.head = operations.Linear(width, out, **where)
        self.modulation = nn.Parameter(torch.empty(1, 2, width, **where))

    def forward(self, x_BSW, time_BW):
        shift, scale = (self.modulation + time_BW[:, None])[:, :, None].unbind(1)
        return self.head(normed(x_BSW, shift, scale))


def gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")
