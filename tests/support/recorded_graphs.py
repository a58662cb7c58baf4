"""A stand-in for CUDA graphs on the CPU: what a captured region asks torch for, operation by operation, and done again.

A replay has the properties of a CUDA graph's: the same operations on the same memory with the same numbers, and no Python.
As on a device, a capture computes nothing that stays: the memory of others is as before, and what the region made is NaN
until the replay. All graphs of a RecordedCaptures share memory: a replay leaves what others have made there as NaN.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.emulated_gpu.tensors import READS, SIZED_BY_VALUES, new_in


@dataclass
class Operation:
    """One of a graph."""

    function: Any
    arguments: tuple
    named: dict[str, Any]
    outputs: list[torch.Tensor]
    """In memory of their own, all new in this operation."""

    def run(self) -> None:
        fresh = _tensors(self.function(*self.arguments, **self.named))
        for place, value in zip((out.untyped_storage() for out in self.outputs), self._new(fresh), strict=True):
            place.copy_(value)

    def _new(self, outputs: list[torch.Tensor]) -> list[torch.UntypedStorage]:
        return [out.untyped_storage() for out in new_in(outputs, self.arguments, self.named)]


@dataclass
class RecordedGraph:
    """What a capture has recorded."""

    operations: list[Operation] = field(default_factory=list)
    missing: list[torch.Tensor] = field(default_factory=list)
    """Outputs of operations that ran during the capture, and that no replay does."""

    @property
    def memory(self) -> dict[int, torch.Tensor]:
        """By address, a tensor for each piece of memory that its operations have made."""
        made = [*self.missing, *(out for operation in self.operations for out in operation.outputs)]
        return {out.untyped_storage().data_ptr(): out for out in made}

    def spoil(self) -> None:
        """Have other values in all of it."""
        for out in self.memory.values():
            whole = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
            whole.fill_(0xFF)  # of any floating dtype NaN, of integers -1


class Recording(TorchDispatchMode):
    """Records on the thread that enters it."""

    def __init__(self, graph: RecordedGraph, elsewhere: str = ""):
        """`elsewhere`: see RecordedCaptures."""
        super().__init__()
        self._graph, self._elsewhere = graph, elsewhere
        self._made: set[int] = set()  # addresses of the graph's own memory
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # memory that is written to, a copy

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        named = dict(kwargs or {})
        name = function._schema.name.removeprefix("aten::")
        if name in READS or name in SIZED_BY_VALUES:  # these stop the host
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for written in (named.get(argument.name) for argument in function._schema.arguments if argument.is_out):
            self._keep(written)
        found = function(*args, **named)
        outputs = new_in(_tensors(found), args, named)
        self._made |= {out.untyped_storage().data_ptr() for out in outputs}
        if self._elsewhere and self._elsewhere in name:
            self._graph.missing += outputs
        else:
            self._graph.operations.append(Operation(function, args, named, outputs))
        return found

    def undo(self) -> None:
        """Have the memory of others as it was before."""
        for place, before in self._before.values():
            place.copy_(before)

    def _keep(self, written: Any) -> None:
        for tensor in _tensors(written):
            storage = tensor.untyped_storage()
            if (at := storage.data_ptr()) not in self._made and at not in self._before:
                self._before[at] = storage, storage.clone()


_capturing = threading.local()


def in_graph(_device: torch.device) -> bool:
    """In the place of device_copies.in_graph: on this thread a capture is under way."""
    return getattr(_capturing, "on", False)


class RecordedCaptures:
    """In the place of CudaCaptures."""

    elsewhere = ""
    """Operations with this in their names are launched on another stream than the captured one: no graph has them."""

    def __init__(self, device: torch.device):
        self.graphs: list[RecordedGraph] = []

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        graph = RecordedGraph()
        recording = Recording(graph, self.elsewhere)
        _capturing.on = True
        try:
            with recording:
                output = work()
        finally:
            _capturing.on = False
            recording.undo()
            graph.spoil()
        self.graphs.append(graph)
        return output, lambda: self._replay(graph)

    def _replay(self, graph: RecordedGraph) -> None:
        for each in self.graphs:
            each.spoil()
        for operation in graph.operations:
            operation.run()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
