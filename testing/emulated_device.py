"""A device that a CPU rank stands in for: memory held to a budget, and copies that take their time on a thread."""

import functools
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from parallel_backend.core.host_memory import host_memory
from parallel_backend.processes.local import LocalRanks, Ranks
from parallel_backend.rank.start.entry import main
from parallel_backend.wire.diagnosis import DeviceMemoryReport
from parallel_backend.wire.rank_settings import RankSettings, StartSettings

if TYPE_CHECKING:  # ranks import it themselves, once their environment is set
    from parallel_backend.rank.worker import Worker

STALE = 0xFF
"""Byte that new memory is filled with: a NaN in every floating dtype, so that weights used before they are there show."""


@dataclass(frozen=True)
class EmulatedDevice:
    """`nbytes` of memory for weights, and copies between that memory and host memory that overlap with compute."""

    nbytes: int
    bytes_per_second: float


class EmulatedOutOfMemoryError(MemoryError):
    """The device's budget is spent."""


class EmulatedCopies:
    """See DeviceCopies. Weights and additions to them count, not what the rank computes with them."""

    unified, working_bytes = False, 0

    def __init__(self, rank: int, settings: EmulatedDevice):
        self.device, self.rank, self.settings = torch.device("cpu"), rank, settings
        self.used = self.peak_bytes = 0
        self._thread = ThreadPoolExecutor(1, f"copies of rank {rank}")
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the copies under way are through, by time.monotonic

    @property
    def free(self) -> int:
        return self.settings.nbytes - self.used

    def memory(self, rank: int, held: int, others: int, vae: int) -> DeviceMemoryReport:
        """Parts of VAEs are in host memory, where the rank really is. `held`, `others`: with additions to weights."""
        node, total, rate = platform.node(), self.settings.nbytes, self.settings.bytes_per_second
        place, host_free = f"{node} emulated {rank}", host_memory()[0]
        free = max(0, total - max(self.used, held + others))  # additions are in host memory, where they find room
        return DeviceMemoryReport(rank, place, free, held, 0, total, node, host_free, rate)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.free:
            raise EmulatedOutOfMemoryError(
                f"out of memory: the emulated device of rank {self.rank} has {self.settings.nbytes} bytes, of which "
                f"{self.used} are in use; {nbytes} more do not fit"
            )
        self.used += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used)
        return torch.full((nbytes,), STALE, dtype=torch.uint8)

    def restart_peak(self) -> None:
        self.peak_bytes = self.used

    def begin_measuring(self) -> None:
        pass

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
    """Copy at `ends` by time.monotonic. Until then `destination` is STALE, and what is written to `source` is copied too."""
    destination.fill_(STALE)
    time.sleep(max(0.0, ends - time.monotonic()))
    destination.copy_(source)


def worker_on(device: EmulatedDevice, settings: RankSettings, *parts: Any) -> "Worker":
    """A CPU rank's Worker, whose weights are on the device. `parts`: as Worker's."""
    from parallel_backend.rank.worker import Worker

    return Worker(settings, *parts, copies=EmulatedCopies(settings.rank, device))


def enter(device: EmulatedDevice, settings: RankSettings, connection: Connection) -> None:
    """A rank's entry, as entry.main."""
    main(settings, connection, functools.partial(worker_on, device))


def start_with(device: EmulatedDevice) -> Callable[[StartSettings], Ranks]:
    """The `start` argument of a Pool: ranks in processes, each with an emulated device."""
    return functools.partial(LocalRanks, entry=functools.partial(enter, device))
