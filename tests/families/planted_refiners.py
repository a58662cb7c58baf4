"""Small classes whose latent's tokens pass blocks of their own, such as Z-Image's refiners, and then others with words. Most
have one thing that goes wrong in a band between the two, or behind both."""

import torch
from torch import nn

from tests.families.planted_bands import Banded
from tests.families.planted_classes import LATE, WIDTH
from tests.families.planted_tokens import rows

MULTIPLE = 8


class Refines(Banded):
    """Tokens are filled up, then refined, then words come before them. The class counts words by all tokens."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device, blocks=6)
        self.refiner = nn.ModuleList(self.block(operations) for _ in range(2))

    def mixed(self, h, words, emb, t):
        count = h.shape[1]
        h = torch.cat((h, words.new_ones(len(h), -count % MULTIPLE, WIDTH)), 1)
        filled_up, table = h.shape[1], rows(h.shape[1], h)
        for block in self.refiner:
            h = block(h, emb, table)
        both = torch.cat((words, self.between(h, t)), 1)
        first, table = both.shape[1] - filled_up, rows(both.shape[1], h)
        for block in self.blocks:
            both = block(both, emb, table)
        return self.left(both[:, first:][:, :count], h[:, :count])

    def between(self, h, t):
        return h

    def left(self, h, refined):
        return h


class PoolsRefined(Refines):
    def between(self, h, t):
        return h + 0.1 * h.mean(1, keepdim=True)


class PoolsRefinedLate(PoolsRefined):
    def between(self, h, t):
        return super().between(h, t) if float(t[0]) < LATE else h


class PoolsRefinedBehind(Refines):
    """Later stages do not have the refined tokens."""

    def left(self, h, refined):
        return h + 0.1 * refined.mean(1, keepdim=True)


class CountsRefined(Refines):
    """Tokens that have values."""

    def between(self, h, t):
        return h * (1 + h.isfinite().all(-1).float().mean())
