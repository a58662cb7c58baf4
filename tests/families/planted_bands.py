"""Small classes in the form of ComfyUI's whose tokens sequence ranks may share out. Most have one thing that goes wrong in a
band of the latent (PipeFusion), in front of their blocks or behind them."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tests.families.planted_classes import LATE, WIDTH
from tests.families.planted_tokens import Mixing, PictureFirst, Tokens, TwoStreams, rows


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

    fill = "replicate"

    def entering(self, x):
        x = F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2, 0, 0), mode=self.fill)
        return x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).mean((-1, -3)).flatten(2).transpose(1, 2)

    def leaving(self, h, x):
        h = h.transpose(1, 2).unflatten(2, (x.shape[2], -(-x.shape[3] // 2), -1))
        return h.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., : x.shape[-2], : x.shape[-1]]


class FillsUpInACircle(TwoRows):
    fill = "circular"


class NeedsColumns(Banded):
    """As PixArt, which divides by a size that is 0 for a small latent."""

    def entering(self, x):
        assert x.shape[-1] >= 13
        return super().entering(x)


class WordsInFront(Banded):
    """One stream: fill-up and words, then the latent."""

    def mixed(self, h, words, emb, t):
        first = torch.cat((words, words.new_zeros(len(h), -h.shape[1] % 4, WIDTH)), 1)
        return super().mixed(torch.cat((first, h), 1), words, emb, t)[:, first.shape[1] :]


class MovesLaterPatches(Banded):
    """Right in every band, of which the first one alone has words. Words move the tokens of a later naive patch."""

    class block(Mixing):
        def forward(self, x, emb, table, words):
            has_words = table.shape[1] > words and torch.equal(table[:, :words], rows(words, table))
            is_later = has_words and not torch.equal(table[:, words], rows(words + 1, table)[:, words])
            return super().forward(x + is_later, emb, table)

    def mixed(self, h, words, emb, t):
        h = torch.cat((words, h), 1)
        table = rows(h.shape[1], h)
        for block in self.blocks:
            h = block(h, emb, table, words.shape[1])
        return h[:, words.shape[1] :]


class RefinesWords(Banded):
    """Words pass blocks of their own, then all tokens joint ones: a cut of both lists does not run."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device, blocks=8)
        self.refiner = nn.ModuleList(self.block(operations) for _ in range(2))

    def mixed(self, h, words, emb, t):
        for block in self.refiner:
            words = block(words, emb, rows(words.shape[1], h))
        return super().mixed(torch.cat((words, h), 1), words, emb, t)[:, words.shape[1] :]


class MasksAll(Banded):
    """Every block gets the mask of all keys, in which no axis is one of tokens that are cut."""

    class block(Mixing):
        def forward(self, x, emb, table, seen):
            return super().forward(x, emb, table, mask=seen.of_all)

    def mixed(self, h, words, emb, t):
        table, seen = rows(h.shape[1], h), torch.arange(h.shape[1]).to(h.device) != 3
        for block in self.blocks:
            h = block(h, emb, table, SimpleNamespace(of_all=seen[None, None, None]))
        return h


class PoolsInFront(Banded):
    def pooled(self, h, x):
        return 0.1 * h.mean(1)


class PoolsLatent(Banded):
    def pooled(self, h, x):
        return 0.1 * x.amax((2, 3, 4)).repeat(1, WIDTH // 4)


class ScalesLatent(Banded):
    def latent(self, x, t):
        return x / x.abs().amax((1, 2, 3, 4), keepdim=True)


class CountsTokens(Banded):
    """Numbers the tokens that have values."""

    def positions(self, h, x):
        seen = (h.abs().sum(-1) > 0).long().cumsum(1) - 1
        return self.pos[0, seen.clamp(min=0)]


class RowsMixed(Banded):
    axis, late = -2, False

    def latent(self, x, t):
        return x if self.late and float(t[0]) >= LATE else x + 0.1 * x.roll(1, self.axis)


class FramesMixed(RowsMixed):
    axis = -3


class ColumnsMixed(RowsMixed):
    axis = -1


class RowsMixedLate(RowsMixed):
    late = True


class ConvolvedInFront(Banded):
    def latent(self, x, t):
        return F.avg_pool3d(x, (1, 3, 3), 1, (0, 1, 1))


class ByColumns(Banded):
    """Tokens column by column."""

    def entering(self, x):
        return super().entering(x.transpose(-1, -2))

    def leaving(self, h, x):
        return super().leaving(h, x.transpose(-1, -2)).transpose(-1, -2)


class LastRowFirst(Banded):
    def entering(self, x):
        return super().entering(x.flip(-2))

    def leaving(self, h, x):
        return super().leaving(h, x).flip(-2)


class Flipped(Banded):
    """Its output is the other way round."""

    def leaving(self, h, x):
        return super().leaving(h, x).flip(-2)


class RowsSwapped(Banded):
    def leaving(self, h, x):
        out = super().leaving(h, x)
        return torch.cat((out[..., 1:2, :], out[..., :1, :], out[..., 2:, :]), -2)


class ConvolvedBehind(Banded):
    def behind(self, h, t):
        return h + F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)


class PoolsBehind(Banded):
    def behind(self, h, t):
        return h - h.mean(1, keepdim=True)


class PoolsKnownBehind(Banded):
    """Without what is not finite."""

    def behind(self, h, t):
        return h - 0.1 * h.nan_to_num().mean(1, keepdim=True)


class CountsBehind(Banded):
    def behind(self, h, t):
        return h + 0.1 * (h > 0).float().mean(1, keepdim=True)


class PoolsBehindLate(PoolsBehind):
    def behind(self, h, t):
        return super().behind(h, t) if float(t[0]) < LATE else h


class NextRowBehind(Banded):
    def skip(self, x):
        return 0.1 * x.roll(1, -2)


class PoolsLatentBehind(Banded):
    def skip(self, x):
        return 0.1 * x.mean((2, 3, 4), keepdim=True)


class SmoothsOutput(Banded):
    def leaving(self, h, x):
        return F.avg_pool3d(super().leaving(h, x), (1, 3, 1), 1, (0, 1, 0))


class KeepsLatent(Banded):
    """From band to band."""

    def latent(self, x, t):
        before, self.kept = self.kept, x.clone()
        return x if before is None or before.shape != x.shape else x + 0.1 * before


class LatentInTwoStreams(TwoStreams):
    def mixed(self, h, words, emb, t):
        return super().mixed(h, words + 0.1 * h.mean(1, keepdim=True), emb, t)


class TwoLatentStreams(TwoStreams):
    """As a class with a stream of small tokens."""

    def mixed(self, h, words, emb, t):
        return super().mixed(h, h[:, ::2] + words.mean(1, keepdim=True), emb, t)

    def of_picture(self, h, c, words):
        return h[:, c.shape[1] :]


class PooledTokenBehind(Banded):
    """One token more, of all."""

    def mixed(self, h, words, emb, t):
        return super().mixed(torch.cat((h, h.mean(1, keepdim=True)), 1), words, emb, t)[:, :-1]


class ReadsWordsBehind(PictureFirst):
    """Adds what the blocks have made of the words."""

    def of_picture(self, h, c, words):
        picture = super().of_picture(h, c, words)
        return picture + h[:, picture.shape[1] :].mean(1, keepdim=True)


class TableOfLatent(Banded):
    """A table with rows of the token before."""

    def mixed(self, h, words, emb, t):
        table = rows(h.shape[1], h) + 0.1 * h[..., :8].roll(1, 1)
        for block in self.blocks:
            h = block(h, emb, table)
        return h
