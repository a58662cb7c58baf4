"""Small classes in the form of ComfyUI's with modules whose outputs bands share, or seem to."""

import torch
from torch import nn

from tests.families.planted_bands import Banded
from tests.families.planted_classes import LATE, WIDTH
from tests.families.planted_tokens import HEADS, Crossed, Double, Mixing, TwoStreams, optimized_attention


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
