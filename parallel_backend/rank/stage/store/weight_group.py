"""Weights that are moved together, in one piece of memory: those of a block, or all outside of blocks (the ends)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from parallel_backend.rank.stage.weights import VALUES, StageWeights

ENDS = "ends"
"""Name of the group of all weights outside of the stage's blocks."""
LARGE, COARSE, FINE = 1 << 14, 256, 64
"""Tensors of at least LARGE bytes begin at a multiple of COARSE bytes, as torch's allocators place them, because libraries
choose kernels by alignment. Smaller tensors begin at a multiple of FINE bytes."""


@dataclass(frozen=True)
class _WeightSlot:
    """The position of a tensor in the group's memory."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)


class WeightGroup:
    """The parameters `targets`, including scales of packed ones. Their positions in memory never change."""

    _memory: torch.Tensor  # set by `move`

    def __init__(self, name: str, weights: StageWeights, targets: Iterable[str]):
        self.name, self.nbytes, self._weights = name, 0, weights
        self._slots: dict[str, dict[str, _WeightSlot]] = {}
        for target in targets:
            self._slots[target] = {part: self._take(tensor) for part, tensor in weights.tensors(target).items()}
        self._apart: set[str] = set()

    def _take(self, tensor: torch.Tensor) -> _WeightSlot:
        step = COARSE if tensor.nbytes >= LARGE else FINE
        slot = _WeightSlot(-(-self.nbytes // step) * step, tensor.shape, tensor.dtype)
        self.nbytes = slot.offset + tensor.nbytes
        return slot

    def __contains__(self, target: str) -> bool:
        return target in self._slots

    def read(self, memory: torch.Tensor) -> None:
        """Read the file's values into `memory` [nbytes] uint8, on any device."""
        self._weights.read({target: self._views(target, memory) for target in self._slots})

    def move(self, memory: torch.Tensor) -> None:
        """Make the model's parameters views of `memory` [nbytes or more] uint8, whatever it contains now."""
        self._memory = memory
        for target in self._slots.keys() - self._apart:
            self._weights.move(target, self._views(target, memory))

    def set_apart(self, target: str) -> nn.Parameter:
        """Move a parameter that is not packed, with its values, to separate memory on the same device."""
        module, leaf = self._weights.place(target)
        parameter = getattr(module, leaf)
        if target not in self._apart:
            self._apart.add(target)
            parameter.data = parameter.data.clone()
        return parameter

    def rejoin(self, target: str) -> None:
        """Undo `set_apart`: the parameter is a view of the group's memory again."""
        self._apart.discard(target)
        self._weights.move(target, self._views(target, self._memory))

    def values(self, target: str, memory: torch.Tensor) -> torch.Tensor:
        """Return the view of a parameter that is not packed, in `memory`."""
        return self._views(target, memory)[VALUES]

    def _views(self, target: str, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        return {part: slot.view(memory) for part, slot in self._slots[target].items()}


def weight_groups(weights: StageWeights, blocks: Iterable[str]) -> dict[str, WeightGroup]:
    """Return name -> group: the `blocks` "<list>.<index>" in their order, then the ends."""
    members: dict[str, list[str]] = {name: [] for name in (*blocks, ENDS)}
    for target in weights.targets:
        block = ".".join(target.split(".")[:2])
        members[block if block in members else ENDS].append(target)
    return {name: WeightGroup(name, weights, targets) for name, targets in members.items()}
