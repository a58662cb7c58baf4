"""Small classes that a call tells numbers of blocks, as LTX-2 is by Spatio-Temporal Guidance. Most have one thing that goes
wrong where ranks have a part of the tokens."""

import torch

from tests.families.planted_tokens import HEADS, Mixing, Tokens, optimized_attention, rows

TOLD = "stg_self_attn_blocks"


class Passing(Mixing):
    """Gives its values through where it is told. It attends all the same."""

    def forward(self, x, emb, table, told=False):
        q, k, v = self.turned(x, table)
        out = optimized_attention(q, k, v, HEADS, skip_reshape=True)
        return x + self.out(torch.tanh(v.transpose(1, 2).flatten(2) if told else out))


class Numbered(Tokens):
    block = Passing

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        told = (transformer_options or {}).get(TOLD, ())
        h = self.inp(x.flatten(2).transpose(1, 2))
        h = h + self.pos[:, : h.shape[1]] + self.text(context).mean(1, keepdim=True)
        emb, table = torch.tanh(self.time(timestep[:, None] / 1000.0)), rows(h.shape[1], h)
        for number, block in enumerate(self.blocks):
            h = block(h, emb, table, number in told)
        return self.out(h).transpose(1, 2).reshape(x.shape)


class LeavesCallOut(Numbered):
    """Does not attend where it is told, as ComfyUI's LTX-2."""

    class block(Passing):
        def forward(self, x, emb, table, told=False):
            if not told:
                return super().forward(x, emb, table)
            return x + self.out(torch.tanh(self.turned(x, table)[2].transpose(1, 2).flatten(2)))


class PoolsWhereTold(Numbered):
    class block(Passing):
        def forward(self, x, emb, table, told=False):
            x = super().forward(x, emb, table, told)
            return x + x.mean(1, keepdim=True) if told else x


class MixesEntries(Numbered):
    """Where it is told, entries of a batch get each other's values."""

    class block(Passing):
        def forward(self, x, emb, table, told=False):
            x = super().forward(x, emb, table, told)
            return x + x.mean(0, keepdim=True) if told else x
