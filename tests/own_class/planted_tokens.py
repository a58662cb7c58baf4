"""Small classes in the form of ComfyUI's whose blocks attend by its function, so that ranks may share tokens out. Most have
one thing that goes wrong when they do."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.core.own_class import PACKAGES
from tests.own_class.planted_classes import LATE, WIDTH, Right

HEADS = 4
SIZE = WIDTH // HEADS


def attention_planted(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **_others):
    """As one of ComfyUI's functions: [B, S, H x D], or [B, H, S, D] by `skip_reshape`."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


attention_planted.__module__ = PACKAGES[0].attention
optimized_attention = attention_planted


class Mixing(nn.Module):
    """Attention of tokens that have a row of `table` each, and a layer."""

    key_heads = HEADS

    def __init__(self, layers: Any):
        super().__init__()
        self.q, self.kv = layers.Linear(WIDTH, WIDTH), layers.Linear(WIDTH, 2 * self.key_heads * SIZE)
        self.mod, self.out = layers.Linear(WIDTH, 2 * WIDTH), layers.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, emb: torch.Tensor, table: torch.Tensor, **mask: Any) -> torch.Tensor:
        shift, gate = self.mod(emb)[:, None].chunk(2, dim=-1)
        q, k, v = self.turned(x + shift, table)
        out = optimized_attention(q, k, v, HEADS, skip_reshape=True, **mask)
        return x + gate * self.out(torch.tanh(out))

    def turned(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q(x), *self.kv(x).chunk(2, dim=-1)))
        return q * (1 + table[:, None]), k * (1 + table[:, None]), v


class Tokens(Right):
    """One stream, and a table with a row for each token."""

    block: Any = Mixing

    def forward(self, x, timestep, context=None, **_extra):
        t = timestep / 1000.0
        emb = torch.tanh(self.time(t[:, None])) + self.text(context).mean(1)
        h = self.inp(x.flatten(2).transpose(1, 2))
        h = self.mixed(h + self.pos[:, : h.shape[1]], self.text(context), emb, t)
        return self.out(h).transpose(1, 2).reshape(x.shape)

    def mixed(self, h, words, emb, t):
        table = rows(h.shape[1], h)
        for block in self.blocks:
            h = block(h, emb, table)
        return h


def rows(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """[1, tokens, SIZE]"""
    tokens_S, sizes_D = torch.arange(tokens, device=like.device), torch.arange(1, SIZE + 1, device=like.device)
    return torch.sin(tokens_S[:, None] * sizes_D / 3)[None].to(like)


class TextInFull(Tokens):
    """As HunyuanDiT: its text has always as many tokens."""

    words = 12

    def forward(self, x, timestep, context=None, **extra):
        return super().forward(x, timestep, context.unflatten(1, (self.words, 1)).flatten(1, 2), **extra)


class SharedKeys(Tokens):
    """Two heads of queries share one of keys."""

    class block(Mixing):
        key_heads = HEADS // 2


class SharesKeysEarly(SharedKeys):
    """Each head has its own keys at late times."""

    def mixed(self, h, words, emb, t):
        self.block.is_late = float(t[0]) < LATE
        return super().mixed(h, words, emb, t)

    class block(SharedKeys.block):
        def turned(self, x, table):
            q, k, v = super().turned(x, table)
            k, v = (each.repeat_interleave(2, 1) for each in (k, v))
            return q, k * torch.arange(1, HEADS + 1)[:, None, None].to(k) if self.is_late else k, v


class LongSkips(Tokens):
    """As HunyuanDiT: later blocks, of another kind, read what earlier ones have returned. It notes how many there are."""

    class block(Mixing):
        def __init__(self, layers: Any):
            super().__init__(layers)
            self.joins = None

        def forward(self, x, emb, table, skip=None):
            x = x if self.joins is None else self.joins(torch.cat((x, skip), -1))
            return super().forward(x, emb, table)

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device, blocks=8)
        self.depth = 8
        for block in self.blocks[5:]:
            block.joins = operations.Linear(2 * WIDTH, WIDTH)

    def mixed(self, h, words, emb, t):
        table, skips = rows(h.shape[1], h), []
        for number, block in enumerate(self.blocks):
            h = block(h, emb, table, self.skip(skips, t) if number > self.depth // 2 else None)
            if number < self.depth // 2 - 1:
                skips.append(h)
        return h

    def skip(self, skips, t):
        return skips.pop()


class ScaledSkips(LongSkips):
    def skip(self, skips, t):
        return 2 * skips.pop()


class Crossed(Tokens):
    """Its tokens attend to words too, which every rank has."""

    class block(Mixing):
        def forward(self, x, words, emb, table):
            x = super().forward(x, emb, table)
            k, v = self.kv(words).chunk(2, dim=-1)
            return x + optimized_attention(self.q(x), k, v, HEADS)

    def mixed(self, h, words, emb, t):
        table = rows(h.shape[1], h)
        for block in self.blocks:
            h = block(h, words, emb, table)
        return h


class Double(Mixing):
    """Words and picture, of which the first `first` come first in attention and table."""

    words_first = True

    def forward(self, c, h, emb, table):
        parts = (c, h) if self.words_first else (h, c)
        out = super().forward(torch.cat(parts, 1), emb, table).split([part.shape[1] for part in parts], 1)
        return tuple(out if self.words_first else reversed(out))


class TwoStreams(Tokens):
    double: Any = Double

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.streams = nn.ModuleList(self.double(operations) for _ in range(3))

    def mixed(self, c_or_h, words, emb, t):
        c, h = words, c_or_h
        table = rows(c.shape[1] + h.shape[1], h)
        for block in self.streams:
            c, h = block(c, h, emb, table)
        h = torch.cat((c, h) if self.double.words_first else (h, c), 1)
        for block in self.blocks:
            h = block(h, emb, table)
        return self.of_picture(h, c, words)

    def of_picture(self, h, c, words):
        return h[:, words.shape[1] :]


class CountsWordsBetween(TwoStreams):
    """As Flux: it drops as many tokens as the words have behind its first blocks, where a rank has its part of them."""

    def of_picture(self, h, c, words):
        return h[:, c.shape[1] :]


class FillsUp(Tokens):
    """As Z-Image: tokens are filled up to a multiple, so that calls of several sizes have as many, here as many as another
    argument has columns."""

    multiple = 64

    class block(Mixing):
        def forward(self, x, emb, table):
            return super().forward(x, emb[:, :WIDTH], table)

    def mixed(self, h, words, emb, t):
        tokens = h.shape[1]
        h = torch.cat((h, h.new_zeros(len(h), -tokens % self.multiple, WIDTH)), 1)
        return super().mixed(h, words, emb.repeat(1, 2 * self.multiple // WIDTH), t)[:, :tokens]


class ReadsNumber(Tokens):
    """A number of words moves the places of its tokens."""

    def forward(self, x, timestep, context=None, num_tokens=0, **extra):
        self.first = num_tokens
        out = super().forward(x, timestep, context, **extra)
        del self.first
        return out

    def mixed(self, h, words, emb, t):
        return super().mixed(h + 0.1 * self.first, words, emb, t)


class NumberMatters(ReadsNumber):
    """Up to four words it runs its blocks in another order."""

    def mixed(self, h, words, emb, t):
        if self.first > 4:
            return super().mixed(h, words, emb, t)
        for block in reversed(self.blocks):
            h = block(h, emb, rows(h.shape[1], h))
        return h


class PoolsTokens(Tokens):
    class block(Mixing):
        def forward(self, x, emb, table):
            x = super().forward(x, emb, table)
            return x + 0.1 * x.mean(1, keepdim=True)


class NumbersTokens(Tokens):
    """Makes the table of the tokens that a block gets."""

    class block(Mixing):
        def forward(self, x, emb, table):
            return super().forward(x, emb, rows(x.shape[1], x))


class PlainAttention(Tokens):
    """Attends by torch's function, and not by ComfyUI's."""

    class block(Mixing):
        def forward(self, x, emb, table):
            return x + F.scaled_dot_product_attention(*self.turned(x, table)).transpose(1, 2).flatten(2)


class Masked(Tokens):
    class block(Mixing):
        def forward(self, x, emb, table):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return super().forward(x, emb, table, mask=mask)


class MasksKeys(Tokens):
    """Hides a key, of a mask that has a row for each entry."""

    class block(Mixing):
        def forward(self, x, emb, table, seen):
            return super().forward(x, emb, table, mask=seen[:, None, None])

    def mixed(self, h, words, emb, t):
        table, seen = rows(h.shape[1], h), torch.arange(h.shape[1]).to(h.device) != 3
        for block in self.blocks:
            h = block(h, emb, table, seen.expand(len(h), -1))
        return h


class Biased(Tokens):
    """What it adds to keys is more than none or very much."""

    class block(Mixing):
        def forward(self, x, emb, table):
            return super().forward(x, emb, table, mask=x.mean(-1)[:, None, None])


class TwiceInBlockLate(Tokens):
    class block(Mixing):
        def forward(self, x, emb, table):
            x = super().forward(x, emb, table)
            return super().forward(x, emb, table) if float(emb[0, 0]) > 0 else x

    def mixed(self, h, words, emb, t):
        return super().mixed(h, words, torch.where(t[:, None] < LATE, emb.abs() + 1, -emb.abs() - 1), t)


class ReadsAllTokens(Tokens):
    """Behind its blocks, what its first one has returned."""

    def mixed(self, h, words, emb, t):
        table, outputs = rows(h.shape[1], h), []
        for block in self.blocks:
            h = block(h, emb, table)
            outputs.append(h)
        return h + outputs[0].mean(1, keepdim=True)
