"""Layers that words alone pass give no values in bands without words.

A class cannot tell the sizes of tensors without rows, so that a row stands in for the words there (band_tokens.py). The
layers of words would have all of their weights read for it: half of the weights of a block with two streams.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from parallel_backend.own_class.cuts.shared_outputs import modules_of


class IdleLayers:
    """`names`: of the model's linear layers, see core.own_class.name_pattern. `has_words`: whether the present band has
    words. `value`: what they give otherwise."""

    def __init__(self, model: nn.Module, names: Sequence[str], has_words: Callable[[], bool], value: float):
        self._layers = list(modules_of(model, names).values())
        self._has_words, self._value = has_words, value
        self._made: dict[int, tuple[int, torch.dtype]] = {}  # by layer: its outputs' features and dtype

    def put(self) -> None:
        """In the layers' place."""
        for number, layer in enumerate(self._layers):
            layer.forward = functools.partial(self._forward, number, layer.forward)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which they are put."""
        self.put()
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _forward(self, number: int, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if self._has_words() or number not in self._made:
            out = forward(x)
            self._made[number] = out.shape[-1], out.dtype
            return out
        features, dtype = self._made[number]
        return x.new_full((*x.shape[:-1], features), self._value, dtype=dtype)
