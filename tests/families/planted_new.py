"""A transformer in a form that no model here has: a refiner of words, two streams that share keys and are normed over all
heads, registers before the picture's tokens, then single blocks with one layer in front and one behind."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.families.planted_tokens import optimized_attention

WIDTH, HEADS, KEY_HEADS, SIZE, HIDDEN, REGISTERS, SIDE = 64, 4, 2, 16, 96, 3, 2


def turned(x_BHSD: torch.Tensor, angles_1SD: torch.Tensor) -> torch.Tensor:
    first, second = x_BHSD.chunk(2, -1)
    cos, sin = angles_1SD.cos()[:, None], angles_1SD.sin()[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def angles(places: torch.Tensor) -> torch.Tensor:
    """[1, S, SIZE / 2]"""
    return (places[:, None] / 100.0 ** torch.linspace(0, 1, SIZE // 2).to(places))[None]


class Stream(nn.Module):
    """What a block does with one stream before and behind attention."""

    def __init__(self, layers: Any):
        super().__init__()
        self.heads, self.key_heads = HEADS, KEY_HEADS
        self.norm1, self.norm2 = (layers.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.mod = layers.Linear(WIDTH, 6 * WIDTH)
        self.to_q, self.to_k, self.to_v = (layers.Linear(WIDTH, count * SIZE) for count in (HEADS, KEY_HEADS, KEY_HEADS))
        self.q_norm, self.k_norm = layers.RMSNorm(WIDTH, eps=1e-6), layers.RMSNorm(KEY_HEADS * SIZE, eps=1e-6)
        self.to_out = layers.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (
            layers.Linear(*sides) for sides in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )

    def keys(self, x, emb, table):
        shift, scale, *self_gates = self.mod(F.silu(emb))[:, None].chunk(6, -1)
        given = self.norm1(x) * (1 + scale) + shift
        q = self.q_norm(self.to_q(given)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.to_k(given)).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        v = self.to_v(given).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        return (turned(q, table), turned(k, table), v), self_gates

    def behind(self, x, attended, gates):
        gate, shift, scale, gate2 = gates
        x = x + gate * self.to_out(attended)
        given = self.norm2(x) * (1 + scale) + shift
        return x + gate2 * self.down(F.silu(self.gate(given)) * self.up(given))


class Refining(Stream):
    def forward(self, words, emb, table):
        (q, k, v), gates = self.keys(words, emb, table)
        return self.behind(words, optimized_attention(q, k, v, self.heads, skip_reshape=True), gates)


class Joint(nn.Module):
    def __init__(self, layers: Any):
        super().__init__()
        self.words, self.picture = Stream(layers), Stream(layers)

    def forward(self, picture, words, emb, of_picture, of_words):
        own, gates = self.words.keys(words, emb, of_words)
        other, other_gates = self.picture.keys(picture, emb, of_picture)
        q, k, v = (torch.cat(pair, 2) for pair in zip(own, other, strict=True))
        out = optimized_attention(q, k, v, self.words.heads, skip_reshape=True)
        of_words, of_picture = out.split((words.shape[1], picture.shape[1]), 1)
        return self.picture.behind(picture, of_picture, other_gates), self.words.behind(words, of_words, gates)


class Single(nn.Module):
    def __init__(self, layers: Any):
        super().__init__()
        self.heads, self.key_heads, self.hidden = HEADS, KEY_HEADS, HIDDEN
        self.norm, self.mod = layers.LayerNorm(WIDTH, elementwise_affine=False), layers.Linear(WIDTH, 3 * WIDTH)
        self.first = layers.Linear(WIDTH, WIDTH + 2 * KEY_HEADS * SIZE + HIDDEN)
        self.q_norm, self.k_norm = layers.RMSNorm(SIZE, eps=1e-6), layers.RMSNorm(SIZE, eps=1e-6)
        self.last = layers.Linear(WIDTH + HIDDEN, WIDTH)

    def forward(self, x, emb, table):
        shift, scale, gate = self.mod(F.silu(emb))[:, None].chunk(3, -1)
        sizes = self.heads * SIZE, self.key_heads * SIZE, self.key_heads * SIZE, self.hidden
        q, k, v, hidden = self.first(self.norm(x) * (1 + scale) + shift).split(sizes, -1)
        q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (q, k, v))
        q, k = turned(self.q_norm(q), table), turned(self.k_norm(k), table)
        out = optimized_attention(q, k, v, self.heads, skip_reshape=True)
        return x + gate * self.last(torch.cat((out, F.gelu(hidden)), -1))


class ThisMonths(nn.Module):
    """Latent [B, 4, T, H, W] -> the same."""

    def __init__(self, operations: Any, dtype: Any, device: Any):
        super().__init__()
        channels = 4 * SIDE * SIDE
        self.inp, self.time, self.text = (
            operations.Linear(*sides) for sides in ((channels, WIDTH), (1, WIDTH), (16, WIDTH))
        )
        self.registers = nn.Parameter(torch.empty(1, REGISTERS, WIDTH))
        self.refiner = nn.ModuleList(Refining(operations) for _ in range(2))
        self.joint = nn.ModuleList(Joint(operations) for _ in range(3))
        self.single = nn.ModuleList(Single(operations) for _ in range(4))
        self.norm, self.mod = operations.LayerNorm(WIDTH, elementwise_affine=False), operations.Linear(WIDTH, 2 * WIDTH)
        self.out = operations.Linear(WIDTH, channels)

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        frames, height, width = x.shape[2], -(-x.shape[3] // SIDE), -(-x.shape[4] // SIDE)
        padded = F.pad(x, (0, width * SIDE - x.shape[4], 0, height * SIDE - x.shape[3], 0, 0), mode="circular")
        cut = padded.unflatten(4, (width, SIDE)).unflatten(3, (height, SIDE))  # b c t h p w q
        tokens = self.inp(cut.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3))
        emb, words = torch.tanh(self.time(timestep[:, None] / 1000.0)), self.text(context)
        picture = torch.cat((self.registers.expand(len(x), -1, -1), tokens), 1)
        of_words = angles(torch.arange(words.shape[1], dtype=x.dtype, device=x.device))
        of_picture = angles(torch.arange(picture.shape[1], dtype=x.dtype, device=x.device) + 7)
        for block in self.refiner:
            words = block(words, emb, of_words)
        for block in self.joint:
            picture, words = block(picture, words, emb, of_picture, of_words)
        both, of_both = torch.cat((words, picture), 1), torch.cat((of_words, of_picture), 1)
        for block in self.single:
            both = block(both, emb, of_both)
        scale, shift = self.mod(F.silu(emb))[:, None].chunk(2, -1)
        tokens = self.out(self.norm(both[:, -tokens.shape[1] :]) * (1 + scale) + shift)
        grid = tokens.unflatten(1, (frames, height, width)).unflatten(-1, (4, SIDE, SIDE))  # b t h w c p q
        return grid.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)[..., : x.shape[3], : x.shape[4]]
