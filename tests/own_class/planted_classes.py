"""Small classes in the form of ComfyUI's, which ComfyUI does not have. Most have one thing that goes wrong on ranks."""

from typing import Any

import torch
from torch import nn

WIDTH = 32
LATE = 0.005
"""Below this time some classes do something else."""


class Block(nn.Module):
    def __init__(self, layers: Any):
        super().__init__()
        self.mod, self.lin, self.out = (
            layers.Linear(WIDTH, 2 * WIDTH),
            layers.Linear(WIDTH, WIDTH),
            layers.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        shift, gate = self.mod(emb)[:, None].chunk(2, dim=-1)
        mixed = torch.softmax(x @ x.transpose(1, 2) / 6, dim=-1) @ self.lin(x + shift)
        return x + gate * self.out(torch.tanh(mixed))


class Right(nn.Module):
    """Latent [B, 4, T, H, W] -> the same. Subclasses change what is between prologue and epilogue."""

    def __init__(self, operations: Any, dtype: Any, device: Any, blocks: int = 4):
        super().__init__()
        sides = (4, WIDTH), (WIDTH, 4), (1, WIDTH), (16, WIDTH)
        self.inp, self.out, self.time, self.text = (operations.Linear(*side) for side in sides)
        self.pos = nn.Parameter(torch.empty(1, 4096, WIDTH))
        self.blocks = nn.ModuleList(self.block(operations) for _ in range(blocks))
        self.kept: Any = None

    block: Any = Block

    def forward(self, x, timestep, context=None, transformer_options=None, **_extra):
        t = timestep / 1000.0
        emb = torch.tanh(self.time(t[:, None])) + self.text(context).mean(1)
        h = self.inp(x.flatten(2).transpose(1, 2))
        h = self.through(h + self.pos[:, : h.shape[1]], emb, t, x)
        return self.out(h).transpose(1, 2).reshape(x.shape)

    def through(self, h, emb, t, x):
        for block in self.blocks:
            h = block(h, emb)
        return h

    def all_of(self, h, emb):
        """The outputs of all blocks."""
        outputs = []
        for block in self.blocks:
            h = block(h, emb)
            outputs.append(h)
        return outputs


class InPlace(Right):
    """Adds to the tokens in place between blocks, and reads the first block's input at the end."""

    def through(self, h, emb, t, x):
        first, pos = h, self.pos[:, : h.shape[1]]
        for block in self.blocks:
            h = block(h, emb)
            h += pos
        return h + first


class Two(nn.Module):
    def __init__(self, layers: Any):
        super().__init__()
        self.a, self.b = Block(layers), Block(layers)

    def forward(self, c, h, emb):
        both = self.a(torch.cat((c, h), 1), emb)
        return both[:, : c.shape[1]], self.b(both[:, c.shape[1] :], emb), None


class Registers(Right):
    """Two streams in a dictionary of blocks, with registers, then joint blocks: another layout than usual."""

    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.registers = nn.Parameter(torch.empty(1, 3, WIDTH))
        self.streams = nn.ModuleDict({f"stream{number}": Two(operations) for number in range(3)})

    def through(self, h, emb, t, x):
        c = self.registers.repeat(len(h), 1, 1)
        for block in self.streams.values():
            c, h, _ = block(c, h, emb=emb)
        return super().through(torch.cat((c, h), 1), emb, t, x)[:, c.shape[1] :]


class PoolsBatch(Right):
    def through(self, h, emb, t, x):
        return super().through(h, emb - 0.1 * emb.mean(0, keepdim=True), t, x)


class PoolsBatchLate(Right):
    def through(self, h, emb, t, x):
        h = super().through(h, emb, t, x)
        return torch.where(t[:, None, None] < LATE, h - h.mean(0, keepdim=True), h)


class KeepsFirst(Right):
    def through(self, h, emb, t, x):
        if self.kept is None or self.kept.shape != emb.shape:
            self.kept = emb
        return super().through(h, emb + self.kept, t, x)


class CountsToTen(Right):
    """Another result in late calls alone."""

    calls = 0

    def through(self, h, emb, t, x):
        self.calls += 1
        return super().through(h, emb * (2 if self.calls > 10000 else 1), t, x)


class CountsCalls(Right):
    def __init__(self, operations, dtype, device):
        super().__init__(operations, dtype, device)
        self.counted = iter(range(1000))

    def through(self, h, emb, t, x):
        return super().through(h, emb * (1 + 0.01 * next(self.counted)), t, x)


class HiddenSkipLate(Right):
    """Through a comparison, which has no NaN."""

    def through(self, h, emb, t, x):
        outputs = self.all_of(h, emb)
        return torch.where(t[:, None, None] < LATE, outputs[-1] + (outputs[0] > 0).to(h), outputs[-1])


class SkipsBlockLate(Right):
    def through(self, h, emb, t, x):
        for index, block in enumerate(self.blocks):
            if index != 1 or float(t[0]) > LATE:
                h = block(h, emb)
        return h


class OtherOrder(Right):
    def through(self, h, emb, t, x):
        for block in self.blocks if float(t[0]) > 0.5 else reversed(self.blocks):
            h = block(h, emb)
        return h


class Twice(Right):
    def through(self, h, emb, t, x):
        return super().through(super().through(h, emb, t, x), emb, t, x)


class WritesArgument(Right):
    def through(self, h, emb, t, x):
        out = super().through(h, emb, t, x)
        x.mul_(0.9)
        return out


class PadsArgument(Right):
    """As HunyuanDiT: puts the same into its text, in each call."""

    def forward(self, x, timestep, context=None, **extra):
        context[:, -2:] = self.text.weight[0]
        return super().forward(x, timestep, context, **extra)


class WritesTime(Right):
    """What it puts there is the same in calls of one time alone."""

    def forward(self, x, timestep, context=None, **extra):
        context[:, -1:] = torch.where(context[:, -1:].abs() < 9, timestep[:, None, None] + 10, context[:, -1:])
        return super().forward(x, timestep, context, **extra)


class WritesOption(Right):
    """As causal Wan: keys and values in a dictionary of transformer_options."""

    def forward(self, x, timestep, context=None, transformer_options=None, **extra):
        cache = (transformer_options or {}).get("cache")
        if cache is not None:
            cache["end"] += 1
        return super().forward(x, timestep, context)


class ReadsOption(Right):
    """Of transformer_options, which ranks do not get."""

    def forward(self, x, timestep, context=None, transformer_options=None, **extra):
        return super().forward(x, timestep, context) * (transformer_options or {}).get("factor", 1.0)


class ReturnsKeys(Right):
    """As HiDream-O1: blocks return keys, of a shape of their own."""

    class block(Block):
        def forward(self, x, emb):
            return super().forward(x, emb), x[..., :2]

    def through(self, h, emb, t, x):
        for block in self.blocks:
            h, _ = block(h, emb)
        return h
