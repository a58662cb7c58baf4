"""Small classes in the form of ComfyUI's Cosmos, whose blocks get tokens on axes of frames, rows and columns. Most have one
thing that goes wrong on ranks that have a part of them, which has one frame and one row."""

from typing import Any

import torch

from tests.families.planted_tokens import Mixing, Tokens, rows


class Axes(Mixing):
    """[B, T, H, W, D], and a place of each token in the same form."""

    def forward(self, x: torch.Tensor, places: torch.Tensor, emb: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mixed = super().forward((x + places).flatten(1, 3), emb, table)
        return x + self.last((mixed.unflatten(1, x.shape[1:4]) - x) * torch.sigmoid(emb[:, None, None, None]))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OnAxes(Tokens):
    block: Any = Axes

    def forward(self, x, timestep, context=None, **_extra):
        t = timestep / 1000.0
        emb = torch.tanh(self.time(t[:, None])) + self.text(context).mean(1)
        h, tokens = self.inp(x.movedim(1, -1)), x[0, 0].numel()
        places = self.pos[:, :tokens].unflatten(1, x.shape[2:]).expand(len(x), -1, -1, -1, -1)
        return self.out(self.blocks_of(h, places, emb, rows(tokens, h))).movedim(-1, 1)

    def blocks_of(self, h, places, emb, table):
        for block in self.blocks:
            h = block(h, places, emb, table)
        return h


class BatchBehind(OnAxes):
    """As Cosmos 1: [T, H, W, B, D]."""

    class block(Axes):
        def forward(self, x, places, emb, table):
            return super().forward(x.movedim(3, 0), places.movedim(3, 0), emb, table).movedim(0, 3)

    def blocks_of(self, h, places, emb, table):
        return super().blocks_of(h.movedim(0, 3), places.movedim(0, 3), emb, table).movedim(3, 0)


class PlacesBetween(OnAxes):
    """As Cosmos 1: added between blocks, where a rank has its part of the tokens."""

    def blocks_of(self, h, places, emb, table):
        for block in self.blocks:
            h = block(h + places, torch.zeros_like(h), emb, table)
        return h


class NextColumn(OnAxes):
    class block(Axes):
        def last(self, x):
            return x + 0.1 * x.roll(1, 3)


class PoolsEachFrame(OnAxes):
    """The mean of each frame."""

    class block(Axes):
        def last(self, x):
            return x + 0.1 * x.mean((2, 3), keepdim=True)


class CountsFrames(OnAxes):
    """By the sizes that a block gets."""

    class block(Axes):
        def last(self, x):
            frames = torch.arange(x.shape[1], dtype=x.dtype)
            return x * (1 + frames[:, None, None, None])


class TimePerFrame(OnAxes):
    """As Cosmos Predict2 with a mask: each frame has a time, which is spread over its rows and columns."""

    class block(Axes):
        def forward(self, x, places, emb, table):
            return super().forward(x, places, emb.mean(1), table) * (1 + emb[:, :, None, None])

    def blocks_of(self, h, places, emb, table):
        frames = torch.linspace(0, 1, h.shape[1], dtype=h.dtype)
        return super().blocks_of(h, places, emb[:, None] * (1 + frames[:, None]), table)
