"""Small classes that work on all tokens between their blocks, or have modules whose outputs bands share. Most have one thing
there that goes wrong on ranks that have a part of the tokens."""

import torch
from torch import nn

from tests.own_class.planted_bands import Banded
from tests.own_class.planted_classes import LATE, WIDTH
from tests.own_class.planted_tokens import (
    HEADS,
    CountsWordsBetween,
    Crossed,
    Double,
    Mixing,
    Tokens,
    TwoStreams,
    optimized_attention,
    rows,
)


class ChangingWords(CountsWordsBetween):
    """As HiDream-I1: each block gets more words, which are cut off behind it. Words come behind the picture."""

    class double(CountsWordsBetween.double):
        words_first = False

    def mixed(self, h, words, emb, t):
        picture, table = h.shape[1], rows(h.shape[1] + 2 * words.shape[1], h)
        c = words
        for number, block in enumerate(self.streams):
            c, h = block(torch.cat((c, words + number), 1), h, emb, table)
            c = c[:, : words.shape[1]]
        h = torch.cat((h, c), 1)
        kept = h.shape[1]
        for number, block in enumerate(self.blocks):
            h = block(torch.cat((h, words - number), 1), emb, table)[:, :kept]
        return h[:, :picture]


class Between(Tokens):
    """As Wan VACE: something with a row for each token is added behind each block."""

    def mixed(self, h, words, emb, t):
        table, hint = rows(h.shape[1], h), torch.cos(h)
        for block in self.blocks:
            h = block(h, emb, table)
            h = h + self.between(h, t) * hint
        return h

    def between(self, h, t):
        return 0.1


class PoolsBetweenLate(Between):
    def between(self, h, t):
        return h.mean(1, keepdim=True) if float(t[0]) < LATE else 0.1


class ComparesBetween(Between):
    """A share of all tokens, behind a comparison."""

    def between(self, h, t):
        return (h > 0).to(h.dtype).mean(1, keepdim=True)


class FirstTokenBetween(Between):
    def between(self, h, t):
        return h[:, :1]


class ReadsItBehindAll(Between):
    """A sum of what it has between its blocks."""

    def mixed(self, h, words, emb, t):
        self.sum = 0
        out = super().mixed(h, words, emb, t)
        sum, self.sum = self.sum, None
        return out + sum

    def between(self, h, t):
        self.sum = self.sum + h
        return 0.1


class ReadsWords(Crossed):
    """A layer of each block gets the words alone."""

    class block(Mixing):
        def __init__(self, layers):
            super().__init__(layers)
            self.words = layers.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x, words, emb, table):
            x = super().forward(x, emb, table)
            k, v = self.words(words).chunk(2, dim=-1)
            return x + optimized_attention(self.q(x), k, v, HEADS)


class OfTokensLate(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layer = layers.Linear(WIDTH, WIDTH)

    def forward(self, h, t):
        return self.layer(torch.where(t.min() < LATE, h, torch.zeros_like(h)))


class SharedEarly(Banded):
    """A module that reads the tokens at late times alone."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.late = OfTokensLate(operations)

    def mixed(self, h, words, emb, t):
        return super().mixed(h + self.late(h, t), words, emb, t)


class WritesIntoOutput(Banded):
    """Its blocks write into what a layer returns."""

    class block(Mixing):
        def forward(self, x, emb, table):
            return super().forward(x + self.mod(emb).mul_(1.5)[:, None].chunk(2, dim=-1)[0], emb, table)


class WordsLayer(TwoStreams):
    """A layer of each of the first blocks gets the words' tokens alone."""

    class double(Double):
        def __init__(self, layers):
            super().__init__(layers)
            self.of_words = layers.Linear(WIDTH, WIDTH)

        def forward(self, c, h, emb, table):
            c, h = super().forward(c, h, emb, table)
            return c + self.of_words(c), h


class Attending(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.q, self.kv = layers.Linear(WIDTH, WIDTH), layers.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, seen):
        return optimized_attention(self.q(x), *self.kv(seen).chunk(2, dim=-1), HEADS)


class WordsAttend(TwoStreams):
    """The words of each of the first blocks attend to themselves, and then to the picture, in modules of their own."""

    class double(Double):
        def __init__(self, layers):
            super().__init__(layers)
            self.to_words, self.to_picture = Attending(layers), Attending(layers)

        def forward(self, c, h, emb, table):
            c = c + self.to_words(c, c)
            return super().forward(c + self.to_picture(c, h), h, emb, table)
