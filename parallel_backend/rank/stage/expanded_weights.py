"""Keeps expanded weights of packed layers as long as a run leaves memory for them.

A packed layer expands its weight at each use. A micro-step of PipeFusion has few rows and expands all weights of its stage:
with M bands, M times a step. A weight that is kept is expanded once a run, in any mode.
"""

from collections.abc import Iterable

import torch

from parallel_backend.rank.free_memory import device_memory

from .linear import PackedLinear

LEAST_SPARE, SPARE = 1 << 30, 0.1
"""Bytes and fraction of the device that stay free for other programs, whichever is more."""


class ExpandedWeights:
    """The expanded weights that one model on a rank keeps. Drop them before memory is measured, read or given away."""

    def __init__(self, layers: Iterable[PackedLinear], device: torch.device):
        self._device = device
        self._room = self._kept = 0
        self._kept_before = -1  # when free memory was last read. -1: not since the last drop
        self._layers = [layer for layer in layers if layer.expands]
        for layer in self._layers:
            layer.keep = self._keep

    def begin_step(self) -> None:
        """Let the coming micro-step keep weights in half of the spare memory. To be called for a micro-step whose own memory
        the allocator has by now. Half, because other ranks on the device may do the same."""
        if self._kept not in (self._kept_before, len(self._layers)):  # else the last look at free memory gave nothing
            self._kept_before = self._kept
            free, total = device_memory(self._device)
            self._room = (free - max(LEAST_SPARE, int(SPARE * total))) // 2

    def drop(self) -> bool:
        """Free all of them, and keep none until `begin_step`. Returns whether there were any."""
        dropped, self._kept, self._kept_before, self._room = self._kept, 0, -1, 0
        for layer in self._layers if dropped else ():
            layer.expanded = None
        return dropped > 0

    def _keep(self, layer: PackedLinear, weight: torch.Tensor) -> None:
        if weight.nbytes <= self._room:
            self._room -= weight.nbytes
            self._kept += 1
            layer.expanded = weight
