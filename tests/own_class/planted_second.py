"""Small classes in the form of ComfyUI's whose blocks attend to the prompt in a module of its own. Most have one thing that
goes wrong if ranks run the module for a second text, too."""

import torch
from torch import nn

from tests.own_class.planted_classes import LATE, WIDTH
from tests.own_class.planted_tokens import HEADS, SIZE, Mixing, Tokens, optimized_attention, rows


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
