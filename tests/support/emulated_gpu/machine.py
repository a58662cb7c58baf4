"""The emulated machine: its devices, their memory, and the record of what went wrong on them."""

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from testing.fake_cuda import Card

ROUND, SEGMENT = 512, 2 << 20
"""Bytes to which torch's allocator rounds an allocation, and what it asks the driver for."""

_HERE = Path(__file__).parent
ROOT = _HERE.parents[2]
_TESTS = (str(ROOT / "tests") + os.sep, str(ROOT / "testing") + os.sep)

Clock = dict[Any, int]
"""Stream -> the number of its operations that are known to be over, or that what follows waits for."""


class Violation(AssertionError):
    """On a device this is a race, a wrong value or a crash: if not now, then with other timing."""


def where(count: int = 4) -> str:
    """The innermost lines of the product that are being run; of its tests, where none of the product is."""
    product, tests = [], []
    frame = sys._getframe(1)
    while frame is not None and len(product) < count:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT) + os.sep) and "site-packages" not in name and not name.startswith(str(_HERE)):
            line = f"{os.path.relpath(name, ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
            (tests if name.startswith(_TESTS) else product).append(line)
        frame = frame.f_back
    return " < ".join(product or tests[:count]) or "?"


class Record:
    """What was noted, by all threads and by processes that were forked from this one."""

    def __init__(self, file: Path):
        self.stops: list[str] = []
        """Each: thread, what stopped the host, the line that asked for it. Of this process."""
        self._file = file
        file.touch()

    @property
    def violations(self) -> list[str]:
        return self._file.read_text().splitlines()

    def violation(self, text: str) -> None:
        line = f"{text}, at {where()}\n".encode()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND)  # one write each, so that processes do not mix
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def stop(self, what: str) -> None:
        self.stops.append(f"{threading.current_thread().name}: {what} at {where(8)}")

    def forget(self) -> None:
        self._file.write_text("")
        self.stops.clear()


class Reserved:
    """Bytes that each process has reserved of each device, and registered of the host, in a file that all of them map."""

    LINES, DEVICES = 256, 16
    HOST = DEVICES
    """In the place of a device's number."""

    def __init__(self, file: Path):
        if not file.exists():
            file.write_bytes(bytes(8 * self.LINES * (2 + self.DEVICES)))
        with file.open("r+b") as opened:
            self._table = numpy.frombuffer(mmap.mmap(opened.fileno(), 0), numpy.int64).reshape(self.LINES, -1)
        self._pid, self._line = 0, 0

    def set(self, device: int, nbytes: int) -> None:
        """Of this process."""
        if self._pid != os.getpid():  # a new one, which was forked from one that has a line already
            self._pid = os.getpid()
            self._line = self._pid % self.LINES
            while self._table[self._line, 0] not in (0, self._pid) and _lives(int(self._table[self._line, 0])):
                self._line = (self._line + 1) % self.LINES
            self._table[self._line] = [self._pid, *[0] * (1 + self.DEVICES)]
        self._table[self._line, 1 + device] = nbytes

    def by_others(self, device: int) -> int:
        lines = [line for line in self._table if line[1 + device] and line[0] != os.getpid()]
        return sum(int(line[1 + device]) for line in lines if _lives(int(line[0])))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]


class Gpu:
    """One device. `host`: what the host knows to be over. Memory in bytes."""

    def __init__(self, index: int, card: Card, reserved_by: Reserved):
        self.index, self.card, self._reserved_by = index, card, reserved_by
        self.host: Clock = {}
        self.streams: list[Any] = []
        self.default: Any = None
        self.pending: list[Any] = []
        """Copies between page-locked memory and the device of which the host does not know that they are over."""
        self.allocated = self.reserved = self.peak = self.in_graphs = 0
        self.elsewhere = 0
        """What other programs have."""
        self.allocations = 0
        self.fail_at: int | None = None
        """Number of the allocation from which on there is no memory."""

    @property
    def reserved_by_others(self) -> int:
        return self._reserved_by.by_others(self.index)

    @property
    def free(self) -> int:
        return self.card.memory - self.reserved - self.elsewhere - self.reserved_by_others

    def take(self, nbytes: int) -> int:
        """Bytes taken for so many. OutOfMemoryError as CUDA's."""
        self.allocations += 1
        if self.fail_at is not None and self.allocations >= self.fail_at:
            raise self._out_of_memory(nbytes)
        self._reserve(self.check_room(nbytes))
        size = _rounded(nbytes)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        return size

    def check_room(self, nbytes: int) -> int:
        """Bytes that would be reserved with so many more. OutOfMemoryError where there are not so many."""
        grown = max(self.reserved, _segments(self.allocated + self.in_graphs + _rounded(nbytes)))
        if grown - self.reserved > self.free:
            raise self._out_of_memory(nbytes)
        return grown

    def _out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU {self.index} has a total capacity of "
            f"{self.card.memory} bytes of which {self.free} bytes is free."
        )

    def give_back(self) -> None:
        """Return what no tensor and no graph has to the driver."""
        self._reserve(_segments(self.allocated + self.in_graphs))

    def _reserve(self, nbytes: int) -> None:
        if nbytes != self.reserved:
            self.reserved = nbytes
            self._reserved_by.set(self.index, nbytes)

    def learn(self, clock: Clock) -> None:
        """The host knows that all this is over."""
        with machine.lock:
            merge(self.host, clock)
            done = [entry for entry in self.pending if self.host.get(entry.stream, 0) >= entry.tick]
            self.pending = [entry for entry in self.pending if entry not in done]
            for entry in done:
                entry.over()


class Machine:
    """The devices that torch has now. `lock`: held where clocks and memory are read and changed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.gpus: list[Gpu] = []
        self.record: Any = None
        self.reserved_by: Any = None
        self.folder: Any = None
        """Of the files that its processes share."""
        self.sync_debug_mode = 0
        """Of torch.cuda.set_sync_debug_mode."""

    @property
    def reserved_elsewhere(self) -> list[int]:
        """Bytes of each device that other processes have."""
        return [of.reserved_by_others for of in self.gpus]

    @property
    def registered_elsewhere(self) -> int:
        """Bytes of host memory that other processes have registered, which page-locks them."""
        return self.reserved_by.by_others(Reserved.HOST)

    def note_registered(self, nbytes: int) -> None:
        """So many are in this process."""
        if self.gpus:
            self.reserved_by.set(Reserved.HOST, nbytes)

    @contextlib.contextmanager
    def of(self, cards: tuple[Card, ...], folder: Path) -> Iterator[None]:
        """`folder`: see Machine.folder."""
        assert not self.gpus, "there are emulated devices already"
        self.folder = folder
        self.record, self.reserved_by = Record(folder / "violations"), Reserved(folder / "memory")
        self.gpus = [Gpu(index, card, self.reserved_by) for index, card in enumerate(cards)]
        self.sync_debug_mode = 0
        try:
            yield
        finally:
            self.gpus = []


machine = Machine()
"""torch.cuda is the process's, and so is this."""


def merge(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND) * ROUND


def _segments(nbytes: int) -> int:
    return -(-nbytes // SEGMENT) * SEGMENT
