"""A small class in the form of MiniMax H3, whose blocks have a layer that video sparse attention alone reads."""

import torch
from torch import nn

from tests.families.planted_classes import WIDTH
from tests.families.planted_tokens import HEADS, Mixing, Tokens, attention_planted, rows

optimized_attention = attention_planted


class GatedAttention(nn.Module):
    turned = Mixing.turned

    def __init__(self, layers):
        super().__init__()
        self.q, self.kv, self.out = (layers.Linear(WIDTH, width) for width in (WIDTH, 2 * WIDTH, WIDTH))
        self.to_gate_compress = layers.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, table):
        return self.out(optimized_attention(*self.turned(x, table), HEADS, skip_reshape=True))


class GatedBlock(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.mod, self.attn = layers.Linear(WIDTH, 2 * WIDTH), GatedAttention(layers)

    def forward(self, x, emb, table):
        shift, gate = self.mod(emb)[:, None].chunk(2, dim=-1)
        return x + gate * torch.tanh(self.attn(x + shift, table))


class Gated(Tokens):
    """Words and video in one stream."""

    block = GatedBlock

    def mixed(self, h, words, emb, t):
        h = torch.cat((words, h), 1)
        table = rows(h.shape[1], h)
        for block in self.blocks:
            h = block(h, emb, table)
        return h[:, words.shape[1] :]
