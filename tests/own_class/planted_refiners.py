"""Small classes with a second list of blocks: refiners of the latent's tokens, such as Z-Image's, or blocks between others
that make hints of a picture, such as Wan VACE's. Most have one thing that goes wrong in a band between the lists, or behind
both."""

import torch
from torch import nn

from tests.own_class.planted_bands import Banded
from tests.own_class.planted_classes import LATE, WIDTH
from tests.own_class.planted_tokens import Double, Mixing, rows

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


class ListsOfModes(Banded):
    """As Flux 3: a dictionary has the lists of the latent's and the words' own blocks. Blocks of both come behind them."""

    block = Double

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        of_mode = lambda: nn.ModuleList(Mixing(operations) for _ in range(2))  # noqa: E731
        self.modes = nn.ModuleDict({"latent": of_mode(), "words": of_mode()})

    def mixed(self, h, words, emb, t):
        table = rows(words.shape[1] + h.shape[1], h)
        for block in self.modes["words"]:
            words = block(words, emb, table[:, : words.shape[1]])
        of_latent = rows(h.shape[1], h)
        for block in self.modes["latent"]:
            h = block(h, emb, of_latent)
        for block in self.blocks:
            words, h = block(words, h, emb, table)
        return h


class Hint(Mixing):
    def __init__(self, layers):
        super().__init__(layers)
        self.after = layers.Linear(WIDTH, WIDTH)

    def forward(self, c, h, emb, table):
        c = super().forward(c + h, emb, table)
        return self.after(c), c


class Hinted(Banded):
    """As Wan VACE. It notes which of its hints is added behind which block."""

    def __init__(self, operations, dtype, device, blocks: int = 8, hint_layers: int = 2):
        super().__init__(operations, dtype, device, blocks)
        self.hints = nn.ModuleList(Hint(operations) for _ in range(hint_layers))
        self.numbers = {number: each for each, number in enumerate(range(0, blocks, blocks // hint_layers))}

    def forward(self, x, timestep, context=None, hint=None, **_extra):
        t, h = timestep / 1000.0, self.inp(self.entering(x))
        emb = torch.tanh(self.time(t[:, None])) + self.text(context).mean(1)
        c = self.hint(self.inp(self.entering(hint)), x, t)
        h, c = self.between(h + self.pos[:, : h.shape[1]], c, emb, t)
        return self.leaving(self.out(self.behind(h, c)), x)

    def between(self, h, c, emb, t):
        table, first = rows(h.shape[1], h), h
        for number, block in enumerate(self.blocks):
            h = block(h, emb, table)
            if (at := self.numbers.get(number)) is not None:
                more, c = self.hints[at](c, first, emb, table)
                h = self.added(h, more, t)
        return h, c

    def hint(self, c, x, t):
        return c

    def added(self, h, more, t):
        return h + more

    def behind(self, h, c):
        return h


class NextHintLate(Hinted):
    def added(self, h, more, t):
        return h + (more if bool((t > LATE).any()) else more.roll(1, dims=1))


class HintsBehindAll(Hinted):
    def behind(self, h, c):
        return h + c.mean(1, keepdim=True)


class LatentInHints(Hinted):
    def hint(self, c, x, t):
        return c + x.mean()
