"""Small classes whose arguments have heads and a width, so that a trial makes them narrower first. Most have one thing that
goes wrong on ranks at their own width alone."""

import torch
from torch import nn

from tests.own_class.planted_classes import LATE
from tests.own_class.planted_tokens import attention_planted as optimized_attention

WIDE = 512


class ScaledBlock(nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.num_heads, self.wide = heads, width >= WIDE
        self.mod, self.qkv, self.out = (
            layers.Linear(width, width),
            layers.Linear(width, 3 * width),
            layers.Linear(width, width),
        )

    def forward(self, x, emb):
        q, k, v = self.qkv(x + self.mod(emb)[:, None]).chunk(3, dim=-1)
        return x + self.out(self.mixed(q, k, v, emb))

    def mixed(self, q, k, v, emb):
        return optimized_attention(q, k, v, self.num_heads)


class Scaled(nn.Module):
    """Latent [B, 4, T, H, W] -> the same."""

    block = ScaledBlock

    def __init__(self, operations, dtype, device, num_heads=8, hidden_size=WIDE, text_dim=16, blocks=4):
        super().__init__()
        width, self.wide = hidden_size, hidden_size >= WIDE
        sides = (4, width), (width, 4), (1, width), (text_dim, width)
        self.inp, self.out, self.time, self.text = (operations.Linear(*side) for side in sides)
        self.blocks = nn.ModuleList(self.block(operations, width, num_heads) for _ in range(blocks))

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        t = timestep / 1000.0
        emb = torch.tanh(self.time(t[:, None]) + self.text(context).mean(1))
        h = self.through(self.inp(self.before(x).flatten(2).transpose(1, 2)), emb, t)
        return self.out(h).transpose(1, 2).reshape(x.shape)

    def before(self, x):
        return x

    def through(self, h, emb, t):
        for block in self.blocks:
            h = block(h, emb)
        return h


class SkipsIfWide(Scaled):
    def through(self, h, emb, t):
        outputs = [h]
        for block in self.blocks:
            outputs.append(block(outputs[-1], emb))
        return outputs[-1] + outputs[1] if self.wide else outputs[-1]


class SkipsIfWideLate(SkipsIfWide):
    def through(self, h, emb, t):
        return super().through(h, emb, t) if self.wide and float(t.max()) < LATE else Scaled.through(self, h, emb, t)


class PoolsTokensIfWide(Scaled):
    class block(ScaledBlock):
        def forward(self, x, emb):
            out = super().forward(x, emb)
            return out + 0.1 * x.mean(1, keepdim=True) if self.wide else out


class MixesHeadsIfWide(Scaled):
    class block(ScaledBlock):
        def mixed(self, q, k, v, emb):
            return super().mixed(q.roll(7, dims=-1) if self.wide else q, k, v, emb)


class OneWidth(Scaled):
    """Does not run narrower."""

    def before(self, x):
        assert self.wide
        return x
