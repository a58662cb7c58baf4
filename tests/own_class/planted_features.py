"""Small classes in the form of ComfyUI's whose layers ranks may share. In most, one thing goes wrong when they do."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.own_class.planted_tokens import HEADS, LATE, SIZE, WIDTH, Tokens, optimized_attention, rows

HIDDEN = 48
FEW_QUERIES = 38
"""Of all heads. In a trial a sequence rank has at least 40, a tensor rank at least 96, and a rank of both at least 20."""


class Packed(nn.Module):
    """Queries, keys and values in a layer, then a gated feed-forward with both halves in a layer."""

    def __init__(self, layers: Any):
        super().__init__()
        self.num_heads, self.width = HEADS, WIDTH
        self.mod, self.qkv = layers.Linear(WIDTH, 6 * WIDTH), layers.Linear(WIDTH, 3 * WIDTH)
        self.proj, self.norm = layers.Linear(WIDTH, WIDTH), layers.LayerNorm(WIDTH, elementwise_affine=False)
        self.q_norm, self.k_norm = layers.RMSNorm(SIZE), layers.RMSNorm(SIZE)
        self.up, self.down = layers.Linear(WIDTH, 2 * HIDDEN), layers.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor, emb: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.mod(emb)[:, None].chunk(6, dim=-1)
        x += gate * self.proj(self.attend(self.norm(x) * (1 + scale) + shift, table))
        hidden, gated = self.up(self.norm(x) * (1 + scale2) + shift2).chunk(2, dim=-1)
        return x + gate2 * self.down(F.silu(gated) * hidden)

    def attend(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (norm(each) * (1 + table[:, None]) for norm, each in ((self.q_norm, q), (self.k_norm, k)))
        return optimized_attention(q, k, v, self.num_heads, skip_reshape=True)


class PacksQueries(Tokens):
    block: Any = Packed


class JoinsFeedForward(Tokens):
    """As Flux's single blocks: one layer before and one behind attention and feed-forward, by widths that it keeps."""

    class block(Packed):
        def __init__(self, layers):
            super().__init__(layers)
            self.width, self.hidden, self.size = WIDTH, HIDDEN, SIZE
            self.first, self.last = layers.Linear(WIDTH, 3 * WIDTH + HIDDEN), layers.Linear(WIDTH + HIDDEN, WIDTH)
            del self.qkv, self.proj, self.up, self.down

        def forward(self, x, emb, table):
            shift, scale, gate, *_ = self.mod(emb)[:, None].chunk(6, dim=-1)
            packed, hidden = self.first(self.norm(x) * (1 + scale) + shift).split([3 * self.width, self.hidden], dim=-1)
            q, k, v = packed.view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            out = optimized_attention(q * (1 + table[:, None]), k, v, self.num_heads, skip_reshape=True)
            return x + gate * self.last(torch.cat((out, F.gelu(hidden)), -1)) / self.size


class NormsAllHeads(Tokens):
    """As Wan: a norm over the queries of all heads, and over the keys."""

    class block(Packed):
        def __init__(self, layers):
            super().__init__(layers)
            self.of_all = self.norm_of_all(layers)
            self.q, self.k, self.v = (layers.Linear(WIDTH, WIDTH) for _ in range(3))
            del self.qkv

        def norm_of_all(self, layers):
            return layers.RMSNorm(WIDTH, eps=1e-6)

        def attend(self, x, table):
            q, k = ((self.of_all(layer(x)).unflatten(-1, (self.num_heads, -1))) for layer in (self.q, self.k))
            q, k = (each * (1 + table[:, :, None]) for each in (q, k))
            return optimized_attention(q.flatten(2), k.flatten(2), self.v(x), self.num_heads)


class CentresAllHeads(NormsAllHeads):
    """A norm that takes the mean away: ranks cannot share it."""

    class block(NormsAllHeads.block):
        def norm_of_all(self, layers):
            return layers.LayerNorm(WIDTH)

        def forward(self, x, emb, table):
            return x + self.proj(self.attend(x, table))


class CountsHeadsItself(PacksQueries):
    """By a number that is no attribute of the block."""

    class block(Packed):
        def attend(self, x, table):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return optimized_attention(q, k, v, HEADS)


class SharesThreeKeys(PacksQueries):
    """Pairs of six heads of queries share one of keys. The class repeats keys itself."""

    class block(Packed):
        def __init__(self, layers):
            super().__init__(layers)
            self.num_heads, self.key_heads = 6, 3
            self.q, self.kv = layers.Linear(WIDTH, 6 * SIZE), layers.Linear(WIDTH, 6 * SIZE)
            self.proj = layers.Linear(6 * SIZE, WIDTH)
            del self.qkv

        def attend(self, x, table):
            q, kv = self.q(x).unflatten(-1, (self.num_heads, -1)), self.kv(x).unflatten(-1, (2, self.key_heads, -1))
            k, v = (each.repeat_interleave(self.num_heads // self.key_heads, dim=2) for each in kv.unbind(2))
            return optimized_attention(*(each.transpose(1, 2) for each in (q, k, v)), self.num_heads, skip_reshape=True)


class ReadsWeight(PacksQueries):
    """Of a layer whose input is cut."""

    class block(Packed):
        def forward(self, x, emb, table):
            return super().forward(x, emb, table) * (1 + self.down.weight.mean())


class TablesByHead(PacksQueries):
    """A table with rows for each head, as LTX-2 and Mochi have; and layers that add a residual and activate their input
    themselves, as from ComfyUI 0.39 on."""

    class block(Packed):
        def forward(self, x, emb, table):
            x = self.proj(self.attend(self.norm(x) + self.mod(emb)[:, None, :WIDTH], table), residual=x)
            return self.down(self.up(self.norm(x)), input_act="swiglu", residual=x)

        def attend(self, x, table):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).unbind(2)
            q, k = (1 + table) * q, (1 + table) * k
            return optimized_attention(*(each.transpose(1, 2) for each in (q, k, v)), self.num_heads, skip_reshape=True)

    def mixed(self, h, words, emb, t):
        table = rows(h.shape[1], h)[:, :, None] * torch.arange(1, HEADS + 1)[:, None].to(h) / HEADS
        for block in self.blocks:
            h = block(h, emb, table)
        return h


class ReadsTablesLate(TablesByHead):
    """The same, at late times alone."""

    class block(TablesByHead.block):
        def forward(self, x, emb, table):
            return super().forward(x, emb, table) * (1 if float(emb[0, 0]) > 0 else 1 + table.mean())

    def mixed(self, h, words, emb, t):
        return super().mixed(h, words, torch.where(t[:, None] < LATE, -emb.abs() - 1, emb.abs() + 1), t)


class FewQueriesElse(PacksQueries):
    """Few queries of few heads are halved: of ranks that have their part of both alone."""

    class block(Packed):
        def attend(self, x, table):
            return super().attend(x, table) * (0.5 if x.shape[1] * self.num_heads < FEW_QUERIES else 1)


class OtherBlockBetween(Tokens):
    """As SD 3.5 medium: a block between others has wider layers, and attends twice."""

    class block(Packed):
        def forward(self, x, emb, table):
            if hasattr(self, "proj2"):
                x = x + self.proj2(self.attend(self.norm(x), table))
            return super().forward(x, emb, table)

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        other = self.blocks[2]
        other.up, other.down = operations.Linear(WIDTH, 4 * HIDDEN), operations.Linear(2 * HIDDEN, WIDTH)
        other.proj2 = operations.Linear(WIDTH, WIDTH)


class ReadsHeadsOutside(PacksQueries):
    """A block's heads, which ranks divide, count outside of it."""

    def mixed(self, h, words, emb, t):
        return super().mixed(h, words, emb, t) * self.blocks[0].num_heads
