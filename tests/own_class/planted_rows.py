"""Small classes in the form of ComfyUI's that attend by rows: each token sees those of its window."""

from dataclasses import dataclass
from functools import partial

import torch

from parallel_backend.core.device_copies import to_device
from parallel_backend.own_class.cuts.attention_calls import attention_by_rows, kept_with
from tests.own_class.planted_tokens import Mixing, TwoStreams

SIZE = 7
"""Tokens of a window, of which ranks and bands have parts."""


@dataclass(frozen=True)
class Windows:
    size: int

    def windows(self, numbers):
        return numbers // self.size

    def __call__(self, attend, rows):
        q_BQHD, k_BKHD, v_BKHD, queries_Q, keys_K = rows
        out, numbers = torch.zeros_like(q_BQHD), (queries_Q, keys_K)
        for window in self.windows(queries_Q).unique().tolist():
            queries, keys = (kept_with(each, window, partial(self.rows, each, window, out.device)) for each in numbers)
            out[:, queries] = attend(q_BQHD[:, queries], k_BKHD[:, keys], v_BKHD[:, keys])
        return out

    def rows(self, numbers, window, device):
        return to_device((self.windows(numbers) == window).nonzero()[:, 0], device)


class Counted(Windows):
    """It counts the rows that it gets."""

    def windows(self, numbers):
        return torch.arange(len(numbers)) // self.size


class Windowed(TwoStreams):
    """Windows of words and picture, one behind the other, in the blocks of one stream."""

    class block(Mixing):
        rule = Windows(SIZE)

        def forward(self, x, emb, table):
            shift, gate = self.mod(emb)[:, None].chunk(2, dim=-1)
            tensors = (each.transpose(1, 2) for each in self.turned(x + shift, table))
            return x + gate * self.out(torch.tanh(attention_by_rows(self.rule, *tensors).flatten(2)))


class CountsRows(Windowed):
    class block(Windowed.block):
        rule = Counted(SIZE)
