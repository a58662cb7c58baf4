"""Memory on a device, and who may use it when."""

import weakref

import torch

from .machine import Gpu, machine, merge
from .streams import Stream, current_stream


class Store:
    """One allocation. It ends with the last tensor in it; then its stream's next allocation may have the memory."""

    __slots__ = ("__weakref__", "_size", "_storage", "capture", "gpu", "readers", "recorded", "stream", "writer")

    def __init__(self, of: Gpu, storage: torch.UntypedStorage):
        self._storage = storage  # its address is this one's key, so it may not be another's before this ends
        self._size = 0
        self.gpu, self.stream = of, current_stream(of.index)
        self.writer: tuple[Stream, int] | None = None
        self.readers: dict[Stream, int] = {}
        """The last read of each stream since the last write."""
        self.recorded: set[Stream] = set()
        """Streams that record_stream has named: the allocator waits for them by itself."""
        with machine.lock:
            self._size = of.take(storage.nbytes())
        self.capture: int | None = None
        """Number of the capture that allocated it, if one did."""
        if self.stream.capture is not None:
            self.capture = self.stream.capture.number
            self.stream.capture.nbytes += self._size

    def read(self, stream: Stream) -> None:
        """An operation of the stream, its present tick, reads here."""
        if self.writer is not None and _unordered(stream, *self.writer):
            machine.record.violation(f"{stream} reads what {self.writer[0]} writes, without waiting for it")
        self.readers[stream] = stream.tick

    def write(self, stream: Stream) -> None:
        if self.writer is not None and _unordered(stream, *self.writer):
            machine.record.violation(f"{stream} writes over what {self.writer[0]} writes, without waiting for it")
        for other, tick in self.readers.items():
            if _unordered(stream, other, tick):
                machine.record.violation(f"{stream} writes over what {other} reads, without waiting for it")
        self.writer, self.readers = (stream, stream.tick), {}

    def __del__(self) -> None:
        if not self._size or self.gpu not in machine.gpus:
            return
        with machine.lock:
            self.gpu.allocated -= self._size
            known = dict(self.stream.clock)
            merge(known, self.gpu.host)
            uses = dict(self.readers)
            if self.writer is not None:
                stream, tick = self.writer
                uses[stream] = max(uses.get(stream, 0), tick)
            for stream, tick in uses.items():
                # A graph's memory goes back to its pool, which only replays use and only a waiting host empties.
                ordered = stream is self.stream or stream in self.recorded or self.capture is not None
                if not ordered and known.get(stream, 0) < tick:
                    machine.record.violation(
                        f"{self._size} bytes of {self.stream} are freed while {stream} may use them, without record_stream"
                    )


def _unordered(stream: Stream, other: Stream, tick: int) -> bool:
    return other is not stream and stream.clock.get(other, 0) < tick


stores: "weakref.WeakValueDictionary[int, Store]" = weakref.WeakValueDictionary()
"""By the address of the storage that has the values."""
