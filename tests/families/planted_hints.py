"""Small classes in the form of ComfyUI's with a list of blocks that run between those of another: they make hints of a
picture, which are added to the latent's tokens. Most have one thing that goes wrong on ranks."""

import torch
from torch import nn

from tests.families.planted_bands import Banded
from tests.families.planted_classes import LATE, WIDTH
from tests.families.planted_tokens import Mixing, rows


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
