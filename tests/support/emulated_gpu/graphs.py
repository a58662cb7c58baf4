"""CUDA graphs: a capture records what is launched on its streams; a replay runs the same operations on the same memory.

As on a device, a capture computes nothing that stays: memory of others is as before, and what it made is NaN until the
replay. Graphs with one pool share memory: a replay leaves what the others have made there as NaN.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .host import POISON
from .machine import Gpu, machine
from .memory import Store
from .streams import Stream, current_stream, here
from .tensors import new_in

Pool = tuple[int, int]


@dataclass(frozen=True)
class Operation:
    """One of a graph, with CPU tensors."""

    work: Callable[..., Any]
    arguments: list
    named: dict[str, Any]
    outputs: list[torch.Tensor]
    """In memory of their own, all new in this operation."""

    def run(self) -> None:
        fresh = new_in(self.work(*self.arguments, **self.named), self.arguments, self.named)
        for output, value in zip(self.outputs, fresh, strict=True):
            output.untyped_storage().copy_(value.untyped_storage())


class Capture:
    """What is launched on a stream, and on those that wait for it, from capture_begin to capture_end."""

    def __init__(self, stream: Stream, mode: str):
        self.operations: list[Operation] = []
        self.of, self.origin, self.mode = stream.gpu, stream, mode
        self.outside: dict[int, weakref.ref[Store]] = {}
        """Memory that the graph uses and that others have allocated."""
        self.reading: list[weakref.ref[Store]] = []
        self.writing: list[weakref.ref[Store]] = []
        self.nbytes = 0
        """Of its allocations, which stay with the graph."""
        self.invalid: str | None = None
        self.number = next(_numbers)
        self._streams = [stream]
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        stream.capture = self

    def join(self, stream: Stream) -> None:
        """The stream has waited for one of the capture: what is launched on it is in the graph too."""
        if stream.capture is None:
            stream.capture = self
            self._streams.append(stream)

    def uses(self, reads: Iterable[Store], writes: Iterable[Store]) -> None:
        for stores, into in ((reads, self.reading), (writes, self.writing)):
            for store in stores:
                into.append(weakref.ref(store))
                if store.capture != self.number:
                    self.outside[id(store)] = weakref.ref(store)

    def keep(self, written: list[torch.Tensor]) -> None:
        """What these hold comes back at the end: a capture computes nothing."""
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()

    def add(self, work: Callable[..., Any], arguments: list, named: dict[str, Any], found: Any) -> None:
        self.operations.append(Operation(work, arguments, named, new_in(found, arguments, named)))

    def forbid(self, what: str) -> None:
        """Raises, as torch and CUDA do for what makes the host wait."""
        self.invalid = what
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def asked(self) -> None:
        """Somebody asks whether an event or a stream is over. On ROCm any thread's question makes a capture invalid."""
        own = here.capture is self
        if own or self.mode == "global" or torch.version.hip is not None:
            self.invalid = "an event was asked"
        if own:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (an event was asked)")

    def end(self) -> None:
        for stream in self._streams:
            stream.capture = None
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


class CudaGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False):
        self._capture: Capture | None = None
        self._pool: Pool | None = None

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        stream = current_stream()
        if stream is stream.gpu.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        assert here.capture is None
        self._pool = pool or graph_pool_handle()
        if _users.get(self._pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool have ended")
        _users[self._pool] = _users.get(self._pool, 0) + 1
        weakref.finalize(self, _leave, self._pool)
        here.capture = self._capture = Capture(stream, capture_error_mode)

    def capture_end(self) -> None:
        capture, here.capture = here.capture, None
        assert capture is not None
        capture.end()
        if capture.invalid is not None:
            self._capture = None
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture ({capture.invalid})")
        _spoil(capture)
        _graphs.add(self)
        capture.of.in_graphs += capture.nbytes
        weakref.finalize(self, _freed, capture.of, capture.nbytes)

    def replay(self) -> None:
        capture, stream = self._capture, current_stream()
        assert capture is not None, "a graph that was not captured"
        for graph in list(_graphs):
            if graph._pool == self._pool and graph._capture is not None:
                _spoil(graph._capture)
        for store in capture.outside.values():
            if store() is None:
                machine.record.violation("a graph is replayed that uses memory which has been freed")
        with machine.lock:
            stream.op()
            for used in capture.reading:
                if (store := used()) is not None:
                    store.read(stream)
            for used in capture.writing:
                if (store := used()) is not None:
                    store.write(stream)
        with torch.inference_mode():
            for operation in capture.operations:
                operation.run()


_graphs: "weakref.WeakSet[CudaGraph]" = weakref.WeakSet()
_numbers = itertools.count(1)
_users: dict[Pool, int] = {}
"""Graphs that have been captured into a pool and have not ended. None are left: torch lets no other one in."""


def graph_pool_handle() -> Pool:
    return next(_numbers), 0


def _leave(pool: Pool) -> None:
    _users[pool] -= 1


def _freed(of: Gpu, nbytes: int) -> None:
    of.in_graphs -= nbytes


def _spoil(capture: Capture) -> None:
    for operation in capture.operations:
        for output in operation.outputs:
            torch.empty(0, dtype=torch.uint8).set_(output.untyped_storage()).fill_(POISON)
