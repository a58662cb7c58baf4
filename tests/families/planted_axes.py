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


class PoolsEachFrame(OnAxes):
    """The mean of each frame."""

    class block(Axes):
        def last(self, x):
            return x + 0.1 * x.mean((2, 3), keepdim=True)
