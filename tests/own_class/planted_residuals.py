"""Small classes in the form of ComfyUI's that add a control's residuals to their tokens. Most have one thing that goes wrong
when ranks share them."""

import functools

import torch

from tests.own_class.planted_classes import LATE
from tests.own_class.planted_tokens import Tokens, TwoStreams, rows


class Controlled(Tokens):
    """Adds a residual behind each block, as ComfyUI's classes do."""

    def forward(self, x, timestep, context=None, control=None, **_extra):
        self.residuals = () if control is None else control["input"]
        out = super().forward(x, timestep, context)
        del self.residuals
        return out

    def mixed(self, h, words, emb, t):
        table = rows(h.shape[1], h)
        for number, block in enumerate(self.blocks):
            h = block(h, emb, table)
            if number < len(self.residuals):
                h = h + self.of(self.residuals[number], t)
        return h

    def of(self, residual, t):
        return residual


class ToPicture(TwoStreams):
    """Two streams, and then one with the words first: residuals are added to the picture's tokens, in place."""

    def forward(self, x, timestep, context=None, control=None, **_extra):
        self.residuals = {"input": (), "output": ()} if control is None else control
        out = super().forward(x, timestep, context)
        del self.residuals
        return out

    def mixed(self, c_or_h, words, emb, t):
        c, h = words, c_or_h
        table = rows(c.shape[1] + h.shape[1], h)
        for number, block in enumerate(self.streams):
            c, h = block(c, h, emb, table)
            if number < len(self.residuals["input"]):
                h = h + self.residuals["input"][number]
        first = c.shape[1]
        h = torch.cat((c, h), 1)
        for number, block in enumerate(self.blocks):
            h = block(h, emb, table)
            if number < len(self.residuals["output"]):
                h = h.clone()
                self.add(h, self.residuals["output"][number], first)
        return h[:, first:]

    def add(self, h, residual, first):
        h[:, first : first + residual.shape[1]] += residual


class Pooled(Controlled):
    def of(self, residual, t):
        return residual.mean(1, keepdim=True)


class PooledLate(Controlled):
    def of(self, residual, t):
        return torch.where((t < LATE)[:, None, None], residual.mean(1, keepdim=True), residual)


class FromNeighbour(Controlled):
    def of(self, residual, t):
        return residual.roll(1, 1)


class AtTheEnd(ToPicture):
    """Adds to the last tokens, which are the picture's on one rank alone."""

    def add(self, h, residual, first):
        h[:, -residual.shape[1] - 1 : -1] += residual


class KeepsResidual(Controlled):
    """Adds the first call's."""

    def of(self, residual, t):
        if self.kept is None or self.kept.shape != residual.shape:
            self.kept = residual
        return self.kept


class WritesResidual(Controlled):
    def of(self, residual, t):
        return residual.mul_(0.5)


class PoolsResiduals(Controlled):
    def of(self, residual, t):
        return residual.mean(0, keepdim=True)


class Replaced:
    """A function of another node may stand in place of a block."""

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        self.replaced = (transformer_options or {}).get("patches_replace", {}).get("dit", {})
        out = super().forward(x, timestep, context)
        del self.replaced
        return out


class AroundBlocks(Replaced, Tokens):
    """As MiniMax H3: words and picture in one stream."""

    def mixed(self, h, words, emb, t):
        h = torch.cat((words, h), 1)
        table = rows(h.shape[1], h)
        for number, block in enumerate(self.blocks):
            if (key := ("double_block", number)) in self.replaced:
                given = {"img": h, "vec": emb, "pe": table}
                replaced = self.replaced[key](given, {"original_block": functools.partial(self.around, block)})["img"]
                h = self.taken(replaced, h, words, t)
            else:
                h = block(h, emb, table)
        return h[:, words.shape[1] :]

    def around(self, block, args):
        return {"img": block(args["img"], args["vec"], args["pe"])}

    def taken(self, replaced, h, words, t):
        return replaced


class TakesNeighboursLate(AroundBlocks):
    def taken(self, replaced, h, words, t):
        return torch.where((t < LATE)[:, None, None], replaced.roll(1, 1), replaced)


class TakesOfBatch(AroundBlocks):
    def taken(self, replaced, h, words, t):
        return replaced - h + (h - replaced).mean(0, keepdim=True)
