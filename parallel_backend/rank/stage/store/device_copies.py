"""The device for the weight store: allocates memory for weights, and copies to and from host memory during computation."""

import functools
import sys

import psutil
import torch

from parallel_backend.core.device_copies import page_locked
from parallel_backend.rank.copy_rate import measured_copy_rate
from parallel_backend.rank.free_memory import read_memory
from parallel_backend.wire.diagnosis import DeviceMemoryReport


class Ticket:
    """A copy to wait for. The base class represents a copy that has ended: its methods return at once."""

    def wait(self) -> None:
        """Make everything that the rank computes from now on wait for the copy. On CUDA the host does not wait."""

    def finish(self) -> None:
        """Return when the copy is done. Then its source may be overwritten, and the host may read its destination."""


class DeviceCopies:
    """The device of one rank, for all of its models. This class is for devices without a second stream: `copy` waits."""

    def __init__(self, device: torch.device):
        self.device = device
        self.unified = device.type == "cpu"
        """Whether the device's memory is the host's memory. Weights are then stored once and never move."""

    @property
    def peak_bytes(self) -> int:
        """See RunStats."""
        if sys.platform == "win32":
            return psutil.Process().memory_info().peak_wset
        import resource  # POSIX only

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def restart_peak(self) -> None:
        """On CUDA, start `peak_bytes` again."""

    def begin_measuring(self) -> None:
        """Start `working_bytes` again."""

    @property
    def working_bytes(self) -> int:
        """Largest number of bytes that were allocated temporarily: beyond those that existed before or exist now. 0:
        unknown."""
        return 0

    def memory(self, rank: int, held: int, others: int, vae: int) -> DeviceMemoryReport:
        """Return the device's memory report. `held`, `others`, `vae`: bytes of the requesting model, of other models, and of
        VAE parts."""
        return read_memory(rank, self.device, held)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 on the device, uninitialized. Raises torch.OutOfMemoryError or MemoryError if there is no room."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, memory: torch.Tensor) -> None:
        """To be called before the last reference to memory from `allocate` is dropped."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Start a copy between [n] uint8 tensors on the device and in host memory (page-locked for CUDA). Copies run in the
        order of the calls, each after everything that the rank has begun to compute before the call."""
        destination.copy_(source)
        return Ticket()


class CudaCopies(DeviceCopies):
    """A CUDA device: copies run on a second stream during computation."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._peak = self._before = 0  # largest peak before torch's was set back; bytes when measuring began

    @property
    def peak_bytes(self) -> int:
        return max(self._peak, torch.cuda.max_memory_allocated(self.device))

    def restart_peak(self) -> None:
        self._peak = 0
        torch.cuda.reset_peak_memory_stats(self.device)

    def begin_measuring(self) -> None:
        self._peak = self.peak_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    @property
    def working_bytes(self) -> int:
        stays = max(self._before, torch.cuda.memory_allocated(self.device))
        return torch.cuda.max_memory_allocated(self.device) - stays

    def memory(self, rank: int, held: int, others: int, vae: int) -> DeviceMemoryReport:
        return read_memory(rank, self.device, held, others, self._copy_rate, vae)

    @functools.cached_property
    def _copy_rate(self) -> float:
        """DeviceMemoryReport.copy_rate, measured once."""
        return measured_copy_rate(self.device)

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def release(self, memory: torch.Tensor) -> None:
        # torch's allocator knows of the computing stream alone, and gives the memory to its next operation at once. That
        # operation must come after the copies from and to the memory.
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        # The destination may be a slot that a block launched before still reads, or the source may still be computed.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # From memory that is not page-locked the host would wait for the copy in any case.
            destination.copy_(source, non_blocking=page_locked(self.device))
            done = torch.cuda.Event()
            done.record(self._stream)
        return CudaTicket(done, self.device)


class CudaTicket(Ticket):
    """An event that is recorded after a copy."""

    def __init__(self, done: torch.cuda.Event, device: torch.device):
        self._done, self._device = done, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> None:
        self._done.synchronize()


def copies_of(device: torch.device) -> DeviceCopies:
    return CudaCopies(device) if device.type == "cuda" else DeviceCopies(device)
