"""Small classes in the form of ComfyUI's that hand what their attention gives to other nodes' functions. Most have one thing
that goes wrong if ranks guide their own tokens and heads in these functions' place."""

import torch
from torch import nn

from tests.own_class.planted_classes import WIDTH
from tests.own_class.planted_tokens import HEADS, SIZE, TwoStreams, optimized_attention, rows


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
