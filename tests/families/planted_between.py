"""Small classes that work on all tokens between their blocks. Most have one thing there that goes wrong on ranks that have a
part of the tokens."""

import torch

from tests.families.planted_classes import LATE
from tests.families.planted_tokens import CountsWordsBetween, Tokens, rows


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


class NextTokenBetween(Between):
    def between(self, h, t):
        return h.roll(1, 1)


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
