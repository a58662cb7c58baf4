"""Small classes in the form of ComfyUI's that call a function of other nodes in place of a block. Most have one
thing that goes wrong if ranks pass a skipped block's arguments on instead."""

import torch

from tests.own_class.planted_classes import LATE
from tests.own_class.planted_tokens import TwoStreams, rows


class Skippable(TwoStreams):
    """As ComfyUI's classes: two streams, and then one."""

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        self.replaced = (transformer_options or {}).get("patches_replace", {}).get("dit", {})
        out = super().forward(x, timestep, context)
        del self.replaced
        return out

    def mixed(self, c_or_h, words, emb, t):
        c, h = words, c_or_h
        table = rows(c.shape[1] + h.shape[1], h)
        for number, block in enumerate(self.streams):
            c, h = self.two(block, ("double_block", self.number(number)), c, h, emb, table, t)
        h = torch.cat((c, h), 1)
        for number, block in enumerate(self.blocks):
            h = self.one(block, ("single_block", number), h, emb, table)
        return self.of_picture(h, c, words)

    def number(self, number):
        return number

    def two(self, block, key, c, h, emb, table, t):
        if key not in self.replaced:
            return block(c, h, emb, table)

        def around(args):
            c, h = block(args["txt"], args["img"], args["vec"], args["pe"])
            return {"txt": c, "img": h}

        out = self.replaced[key]({"txt": c, "img": h, "vec": emb, "pe": table}, {"original_block": around})
        return self.taken(out, c, t)

    def taken(self, out, c, t):
        return out["txt"], out["img"]

    def one(self, block, key, h, emb, table):
        if key not in self.replaced:
            return block(h, emb, table)

        def around(args):
            return {"img": block(args["img"], args["vec"], args["pe"])}

        return self.replaced[key]({"img": h, "vec": emb, "pe": table}, {"original_block": around})["img"]


class AddsWorkLate(Skippable):
    def taken(self, out, c, t):
        return out["txt"], out["img"] * (1.01 if float(t.min()) < LATE else 1)


class Backwards(Skippable):
    """Other nodes number its blocks from the last one on."""

    def number(self, number):
        return len(self.streams) - 1 - number


class KeepsSkips(Skippable):
    """It keeps that a block was skipped."""

    def two(self, block, key, c, h, emb, table, t):
        if key in self.replaced:
            self.kept = len(self.replaced)
        return super().two(block, key, c, h, emb, table, t)


class OneList(Skippable):
    """Nodes do not reach its second list."""

    def one(self, block, key, h, emb, table):
        return block(h, emb, table)
