"""Small classes in the form of ComfyUI's that other nodes change: they skip blocks, guide what attention gives, or add a
second text. Most have one thing that goes wrong if ranks do so in the nodes' place."""

import torch
from torch import nn

from tests.own_class.planted_classes import LATE, WIDTH
from tests.own_class.planted_residuals import Replaced
from tests.own_class.planted_tokens import HEADS, SIZE, Mixing, Tokens, TwoStreams, optimized_attention, rows

# They call a function of another node in the place of a block.


class Skippable(Replaced, TwoStreams):
    """As ComfyUI's classes: two streams, and then one."""

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


# They hand what their attention gives to functions of other nodes.


class Handing(nn.Module):
    """Attention and a layer of tokens that have a row of `table` each."""

    def __init__(self, layers):
        super().__init__()
        self.q, self.kv = layers.Linear(WIDTH, WIDTH), layers.Linear(WIDTH, 2 * WIDTH)
        self.mod, self.out = layers.Linear(WIDTH, 2 * WIDTH), layers.Linear(WIDTH, WIDTH)

    def forward(self, x, emb, table, transformer_options):
        shift, gate = self.mod(emb)[:, None].chunk(2, dim=-1)
        q, k, v = self.by_head(self.q(x + shift), *self.kv(x).chunk(2, dim=-1))
        q, k = (each * (1 + table[:, None]) for each in (q, k))
        out = self.handed(optimized_attention(q, k, v, HEADS, skip_reshape=True), transformer_options)
        return x + gate * self.made(out, transformer_options)

    def by_head(self, *tensors):
        return (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in tensors)

    def handed(self, out, options):
        for function in options.get("patches", {}).get("attn1_output_patch", []):
            out = function(out, options)
        return out

    def made(self, out, options):
        return self.out(torch.tanh(out))


class HandingTwo(Handing):
    """Words and picture, whose place it tells by those that it has."""

    def forward(self, c, h, emb, table, transformer_options):
        options = {**transformer_options, "img_slice": [c.shape[1], c.shape[1] + h.shape[1]]}
        return super().forward(torch.cat((c, h), 1), emb, table, options).split([c.shape[1], h.shape[1]], 1)


class Guides(TwoStreams):
    """As Flux: two streams, and then one, before which it tells the picture's place by what it has there."""

    block, double = Handing, HandingTwo

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        self.options = self.told(dict(transformer_options or {}))
        out = super().forward(x, timestep, context)
        del self.options
        return out

    def told(self, options):
        return options

    def mixed(self, c_or_h, words, emb, t):
        c, h = words, c_or_h
        table = rows(c.shape[1] + h.shape[1], h)
        for block in self.streams:
            c, h = block(c, h, emb, table, self.options)
        x = torch.cat((c, h), 1)
        options = {**self.options, "img_slice": [c.shape[1], x.shape[1]]}
        for block in self.blocks:
            x = block(x, emb, table, options)
        return self.of_picture(x, c, words)


class GuidesNumbered(Guides):
    """As Krea 2: one stream of words and picture, whose place it tells before its blocks."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        del self.streams

    def mixed(self, c_or_h, words, emb, t):
        x = torch.cat((words, c_or_h), 1)
        table, options = rows(x.shape[1], x), {**self.options, "img_slice": self.place(words, x)}
        for block in self.blocks:
            x = block(x, emb, table, options)
        return x[:, words.shape[1] :]

    def place(self, words, x):
        return [words.shape[1], x.shape[1]]


class HandsOverNothing(Guides):
    class block(Handing):
        def handed(self, out, options):
            return out

    class double(HandingTwo):
        def handed(self, out, options):
            return out


class ReadsFunctions(HandsOverNothing):
    """It hands over nothing, and heeds that there are functions."""

    class block(HandsOverNothing.block):
        def made(self, out, options):
            return super().made(out, options) * (2 if "patches" in options else 1)


class LeavesPromptsOut(Guides):
    def told(self, options):
        options.pop("cond_or_uncond", None)
        return options


class PartOfPicture(GuidesNumbered):
    """Its last token is not guided, and a rank cannot tell which of its own that is."""

    def place(self, words, x):
        return [words.shape[1], x.shape[1] - 1]


class KeepsGuided(Guides):
    class block(Handing):
        def handed(self, out, options):
            if "patches" in options:
                self.count = getattr(self, "count", 0) + 1
            return super().handed(out, options)


class HandingWhole(Handing):
    """It hands over what its last layer gives, of which tensor ranks have all features."""

    def handed(self, out, options):
        return out

    def made(self, out, options):
        return Handing.handed(self, self.out(out), options)


class WholeWidths(GuidesNumbered):
    block = HandingWhole


# Their blocks attend to the prompt in a module of its own.


class Look(nn.Module):
    """The text behind `before` other tokens, which it leaves out."""

    def __init__(self, layers):
        super().__init__()
        self.q, self.k, self.v = (layers.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = layers.Linear(WIDTH, WIDTH)

    def forward(self, x, context, before=0):
        return self.o(self.looked(x, context[:, before:]))

    def looked(self, x, text, **mask):
        k, v = self.keys(x, text)
        return attended(self.q(x), k, v, **mask)

    def keys(self, x, text):
        return self.k(text), self.v(text)


def attended(*tensors, **mask):
    q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in tensors)
    return optimized_attention(q, k, v, HEADS, skip_reshape=True, **mask)


class Looking(Mixing):
    look = Look

    def __init__(self, layers):
        super().__init__(layers)
        self.cross_attn = self.look(layers)

    def forward(self, x, words, emb, table, before):
        return super().forward(x, emb, table) + self.cross_attn(x, words, before=before)


class Looks(Tokens):
    """Two tokens that are not of the text come before it."""

    block = Looking

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.text_embedding = operations.Linear(16, WIDTH)

    def forward(self, x, timestep, context=None, **_extra):
        t = timestep / 1000.0
        words = self.text_embedding(context)
        emb, words = torch.tanh(self.time(t[:, None])) + words.mean(1), self.told(words, t)
        h = self.inp(x.flatten(2).transpose(1, 2))
        h = h + self.pos[:, : h.shape[1]]
        table = rows(h.shape[1], h)
        for block in self.blocks:
            h = block(h, words, emb, table, 2)
        return self.out(h).transpose(1, 2).reshape(x.shape)

    def told(self, words, t):
        return torch.cat((words[:, :2].cos(), words), 1)


class PadsText(Looks):
    """It fills its text up."""

    def told(self, words, t):
        return torch.cat((super().told(words, t), words[:, :1].sin()), 1)


class PadsTextLate(PadsText):
    def told(self, words, t):
        told = super().told(words, t)
        return told if float(t.min()) < LATE else told[:, :-1]


class ValuesOfLatent(Looks):
    """Values of the text are made with all of the latent's tokens, too."""

    class block(Looking):
        class look(Look):
            def keys(self, x, text):
                return self.k(text), self.v(text) + x.mean(1, keepdim=True)


class MasksText(Looks):
    class block(Looking):
        class look(Look):
            def looked(self, x, text, **mask):
                return super().looked(x, text, mask=torch.ones(1, text.shape[1], dtype=torch.bool, device=x.device))
