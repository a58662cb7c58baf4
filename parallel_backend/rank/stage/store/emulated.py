"""A device that a CPU rank stands in for: memory held to a budget, and copies that take their time on a thread."""

import platform
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from parallel_backend.wire.diagnosis import DeviceMemoryReport
from parallel_backend.wire.rank_settings import EmulatedDevice

STALE = 0xFF
"""Byte that new memory is filled with: a NaN in every floating dtype, so that weights used before they are there show."""


class EmulatedOutOfMemoryError(MemoryError):
    """The device's budget is spent."""


class EmulatedCopies:
    """See DeviceCopies. Weights alone count, not what the rank computes with them."""

    unified = False

    def __init__(self, rank: int, settings: EmulatedDevice):
        self.device, self.rank, self.settings = torch.device("cpu"), rank, settings
        self.used = self.peak_bytes = 0
        self._thread = ThreadPoolExecutor(1, f"copies of rank {rank}")
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the copies under way are through, by time.monotonic

    @property
    def free(self) -> int:
        return self.settings.nbytes - self.used

    def memory(self, held: int, host_free: int) -> DeviceMemoryReport:
        """`held`: see DeviceMemoryReport. `host_free`: free bytes of the host's memory, where the rank really is."""
        node, settings = platform.node(), self.settings
        place = f"{node} emulated {self.rank}"
        rate = settings.bytes_per_second
        return DeviceMemoryReport(self.rank, place, self.free, held, 0, settings.nbytes, node, host_free, rate)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.free:
            raise EmulatedOutOfMemoryError(
                f"out of memory: the emulated device of rank {self.rank} has {self.settings.nbytes} bytes, of which "
                f"{self.used} are in use; {nbytes} more do not fit"
            )
        self.used += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used)
        return torch.full((nbytes,), STALE, dtype=torch.uint8)

    def release(self, memory: torch.Tensor) -> None:
        self.used -= memory.nbytes

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> "EmulatedTicket":
        seconds = source.nbytes / self.settings.bytes_per_second
        with self._lock:
            self._free_at = ends = max(time.monotonic(), self._free_at) + seconds
        return EmulatedTicket(self._thread.submit(_copy, destination, source, ends))


class EmulatedTicket:
    """A copy on the thread."""

    def __init__(self, done: Future):
        self._done = done

    def wait(self) -> None:
        self._done.result()

    finish = wait


def _copy(destination: torch.Tensor, source: torch.Tensor, ends: float) -> None:
    """Copy, and return no sooner than at `ends` by time.monotonic."""
    destination.copy_(source)
    time.sleep(max(0.0, ends - time.monotonic()))
