"""Small classes in the form of ComfyUI's whose tokens sequence ranks may share out. Most have one thing that goes wrong in a
band of the latent (PipeFusion), in front of their blocks or behind them."""

import torch
import torch.nn.functional as F

from tests.own_class.planted_classes import LATE, WIDTH
from tests.own_class.planted_tokens import Tokens, TwoStreams


class Banded(Tokens):
    """The parts of a call, of which subclasses change one."""

    def forward(self, x, timestep, context=None, **_extra):
        t, words = timestep / 1000.0, self.text(context)
        h = self.inp(self.entering(self.latent(x, t)))
        emb = torch.tanh(self.time(t[:, None])) + words.mean(1) + self.pooled(h, x)
        h = self.mixed(h + self.positions(h, x), words, emb, t)
        return self.leaving(self.out(self.behind(h, t)), x) + self.skip(x)

    def latent(self, x, t):
        return x

    def entering(self, x):
        return x.flatten(2).transpose(1, 2)

    def leaving(self, h, x):
        return h.transpose(1, 2).reshape(x.shape)

    def pooled(self, h, x):
        return 0.0

    def positions(self, h, x):
        return self.pos[:, : h.shape[1]]

    def behind(self, h, t):
        return h

    def skip(self, x):
        return 0.0


class SkipsToOutput(Banded):
    def skip(self, x):
        return 0.1 * x


class TwoRows(Banded):
    """Tokens of two rows and columns, of a latent that is filled up with its last ones."""

    def entering(self, x):
        x = F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2, 0, 0), mode="replicate")
        return x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).mean((-1, -3)).flatten(2).transpose(1, 2)

    def leaving(self, h, x):
        h = h.transpose(1, 2).unflatten(2, (x.shape[2], -(-x.shape[3] // 2), -1))
        return h.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., : x.shape[-2], : x.shape[-1]]


class WordsInFront(Banded):
    """One stream: fill-up and words, then the latent."""

    def mixed(self, h, words, emb, t):
        first = torch.cat((words, words.new_zeros(len(h), -h.shape[1] % 4, WIDTH)), 1)
        return super().mixed(torch.cat((first, h), 1), words, emb, t)[:, first.shape[1] :]


class PoolsInFront(Banded):
    def pooled(self, h, x):
        return 0.1 * h.mean(1)


class ScalesLatent(Banded):
    def latent(self, x, t):
        return x / x.abs().amax((1, 2, 3, 4), keepdim=True)


class CountsTokens(Banded):
    """Numbers the tokens that have values."""

    def positions(self, h, x):
        seen = (h.abs().sum(-1) > 0).long().cumsum(1) - 1
        return self.pos[0, seen.clamp(min=0)]


class RowsMixed(Banded):
    late = False

    def latent(self, x, t):
        return x if self.late and float(t[0]) >= LATE else x + 0.1 * x.roll(1, -2)


class RowsMixedLate(RowsMixed):
    late = True


class LastRowFirst(Banded):
    def entering(self, x):
        return super().entering(x.flip(-2))

    def leaving(self, h, x):
        return super().leaving(h, x).flip(-2)


class Flipped(Banded):
    """Its output is the other way round."""

    def leaving(self, h, x):
        return super().leaving(h, x).flip(-2)


class PoolsBehind(Banded):
    def behind(self, h, t):
        return h - h.mean(1, keepdim=True)


class CountsBehind(Banded):
    def behind(self, h, t):
        return h + 0.1 * (h > 0).float().mean(1, keepdim=True)


class PoolsBehindLate(PoolsBehind):
    def behind(self, h, t):
        return super().behind(h, t) if float(t[0]) < LATE else h


class PoolsLatentBehind(Banded):
    def skip(self, x):
        return 0.1 * x.mean((2, 3, 4), keepdim=True)


class KeepsLatent(Banded):
    """From band to band."""

    def latent(self, x, t):
        before, self.kept = self.kept, x.clone()
        return x if before is None or before.shape != x.shape else x + 0.1 * before


class LatentInTwoStreams(TwoStreams):
    def mixed(self, h, words, emb, t):
        return super().mixed(h, words + 0.1 * h.mean(1, keepdim=True), emb, t)
