"""CUDA devices where there is none: what torch.cuda says of them, their memory as figures, a stream that a test moves on.

No tensor can be made on them. It shows which choices are made for a card, what is reckoned from its memory, and what is said
of a device that is busy or stuck; not kernels, allocators or speed. The standard library and torch alone, so that scripts
inside ComfyUI can use it too.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

GB = 1 << 30


@dataclass(frozen=True)
class Card:
    """One device, as its driver describes it. `memory`: bytes. `arch`: of AMD's, such as gfx1100."""

    name: str
    capability: tuple[int, int]
    memory: int
    arch: str | None = None

    def properties(self, index: int) -> SimpleNamespace:
        """As torch.cuda.get_device_properties, of the device with this number."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            total_memory=self.memory,
            multi_processor_count=100,
            is_integrated=0,
            uuid=f"GPU-00000000-0000-0000-0000-{index:012}",
            **({} if self.arch is None else {"gcnArchName": self.arch}),
        )

    def supports_bf16(self, including_emulation: bool) -> bool:
        return self.arch is not None or including_emulation or self.capability >= (8, 0)


PASCAL = Card("NVIDIA GeForce GTX 1080 Ti", (6, 1), 11 * GB)
VOLTA = Card("Tesla V100-SXM2-16GB", (7, 0), 16 * GB)
TURING_16 = Card("NVIDIA GeForce GTX 1660 Ti", (7, 5), 6 * GB)
TURING = Card("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11 * GB)
AMPERE = Card("NVIDIA GeForce RTX 3090", (8, 6), 24 * GB)
ADA = Card("NVIDIA GeForce RTX 4090", (8, 9), 24 * GB)
HOPPER = Card("NVIDIA H100 80GB HBM3", (9, 0), 80 * GB)
BLACKWELL = Card("NVIDIA GeForce RTX 5090", (12, 0), 32 * GB)
RDNA2 = Card("AMD Radeon RX 6800 XT", (10, 3), 16 * GB, "gfx1030")
RDNA3 = Card("AMD Radeon RX 7900 XTX", (11, 0), 24 * GB, "gfx1100")


class FakeEvent:
    """torch.cuda.Event: done as soon as its device has come to where it was recorded."""

    def __init__(self, cuda: "FakeCuda", enable_timing: bool):
        self._cuda, self._timed = cuda, enable_timing
        self._device = cuda.current_device()
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._device = self._cuda.current_device()
        self._at = self._cuda.issued[self._device]

    def query(self) -> bool:
        return self._at <= self._cuda.done[self._device]

    def wait(self, stream: object = None) -> None:
        """Another stream's work waits for it: here each device has one stream, whose order is kept anyway."""

    def synchronize(self) -> None:
        self._cuda.run_to(self._device, self._at)

    def elapsed_time(self, stop: "FakeEvent") -> float:
        if not (self._timed and stop._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and stop.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1000 * (stop._at - self._at)


class FakeStream:
    """torch.cuda.Stream: the one stream of its device."""

    def __init__(self, cuda: "FakeCuda", device: int):
        self._cuda, self._device = cuda, device

    def synchronize(self) -> None:
        self._cuda.run_to(self._device, self._cuda.issued[self._device])


class FakeRuntime:
    """torch.cuda.cudart(), for memory that is page-locked where it is. `locked`: bytes by address. `refused`: how often.

    `budget`: bytes that the driver page-locks at most, as under WSL 2. `devices`: which was current at each call.
    """

    def __init__(self, cuda: "FakeCuda"):
        self._cuda = cuda
        self.budget: float = float("inf")
        self.locked: dict[int, int] = {}
        self.refused = 0
        self.devices: list[int] = []

    def holds(self, memory: torch.Tensor) -> bool:
        """Whether all of the tensor's bytes are page-locked together."""
        first = memory.data_ptr()
        return any(at <= first and first + memory.nbytes <= at + nbytes for at, nbytes in self.locked.items())

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.devices.append(self._cuda.current_device())
        if address in self.locked:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(self.locked.values()) + nbytes > self.budget:
            self.refused += 1
            return 2  # cudaErrorMemoryAllocation
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) is not None else 713  # cudaErrorHostMemoryNotRegistered


class FakeCuda:
    """The devices of `fake_cuda`. Times are seconds of a device's work, memory is bytes; both by the device's number.

    `issue` is a kernel that is queued: the host runs on. `run_to` (`synchronize`, an event's `synchronize`) lets the device
    work until then; on a device that is `stuck` it fails the test, which would otherwise wait for ever. `waits` counts
    those calls: every one stops the host of a real device.

    `hold` is memory that this process has in tensors, `cache` what its allocator keeps beside them, `hold_elsewhere` what
    other processes have.
    """

    def __init__(self, cards: tuple[Card, ...]):
        self.cards = cards
        self.issued = [0.0] * len(cards)
        self.done = [0.0] * len(cards)
        self.stuck = [False] * len(cards)
        self.waits = 0
        self.held, self.cached, self.elsewhere, self.peak = ([0] * len(cards) for _ in range(4))
        self._current = threading.local()  # as in CUDA, of each thread
        self.runtime = FakeRuntime(self)

    def issue(self, seconds: float, device: int = 0) -> None:
        self.issued[device] += seconds

    def advance(self, seconds: float, device: int = 0) -> None:
        """The device works for so long, or until there is nothing more to do."""
        if not self.stuck[device]:
            self.done[device] = min(self.issued[device], self.done[device] + seconds)

    def run_to(self, device: int, at: float) -> None:
        self.waits += 1
        assert not self.stuck[device] or at <= self.done[device], f"the host waits for cuda:{device}, which is stuck"
        self.done[device] = max(self.done[device], at)

    def hold(self, count: int, device: int = 0) -> None:
        """So many bytes more are in this process's tensors: less where negative, and then they stay cached."""
        self._check_room(device, count - self.cached[device])
        self.held[device] += count
        self.cached[device] = max(0, self.cached[device] - count)
        self.peak[device] = max(self.peak[device], self.held[device])

    def hold_elsewhere(self, count: int, device: int = 0) -> None:
        self._check_room(device, count)
        self.elsewhere[device] += count

    def free(self, device: int = 0) -> int:
        return self.cards[device].memory - self.held[device] - self.cached[device] - self.elsewhere[device]

    def _check_room(self, device: int, count: int) -> None:
        if count > self.free(device):
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} bytes on GPU {device}")

    # What follows stands in for torch.cuda's functions of the same names.

    def is_available(self) -> bool:
        return bool(self.cards)

    def device_count(self) -> int:
        return len(self.cards)

    def current_device(self) -> int:
        return getattr(self._current, "index", 0)

    def set_device(self, device: Any) -> None:
        self._current.index = self._index(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        yield
        self.set_device(before)

    def cudart(self) -> FakeRuntime:
        return self.runtime

    def get_device_name(self, device: Any = None) -> str:
        return self.cards[self._index(device)].name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.cards[self._index(device)].capability

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self._index(device)
        return self.cards[index].properties(index)

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return self._index(device) != self._index(peer_device)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self.cards[self.current_device()].supports_bf16(including_emulation)

    def get_allocator_backend(self) -> str:
        return "native"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        index = self._index(device)
        return self.free(index), self.cards[index].memory

    def memory_allocated(self, device: Any = None) -> int:
        return self.held[self._index(device)]

    def memory_reserved(self, device: Any = None) -> int:
        index = self._index(device)
        return self.held[index] + self.cached[index]

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak[self._index(device)]

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        index = self._index(device)
        self.peak[index] = self.held[index]

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {
            "active_bytes.all.current": self.memory_allocated(device),
            "allocated_bytes.all.current": self.memory_allocated(device),
            "reserved_bytes.all.current": self.memory_reserved(device),
        }

    def empty_cache(self) -> None:
        self.cached = [0] * len(self.cards)

    def ipc_collect(self) -> None:
        pass

    def current_stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self, self._index(device))

    def synchronize(self, device: Any = None) -> None:
        index = self._index(device)
        self.run_to(index, self.issued[index])

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def _index(self, device: Any) -> int:
        """As torch reads it: a number, a name or a torch.device; None, or one without a number, is the current one."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        index = self.current_device() if index is None else index
        if index >= len(self.cards):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index


@contextlib.contextmanager
def fake_cuda(*cards: Card) -> Iterator[FakeCuda]:
    """Within it torch.cuda has these cards, and torch counts as built for them: for ROCm if they are AMD's."""
    with replaced(FakeCuda(cards)) as cuda:
        yield cuda


@contextlib.contextmanager
def replaced(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """Within it torch.cuda's functions are the methods of the same names."""
    hip = any(card.arch for card in cuda.cards)
    with contextlib.ExitStack() as stack:
        for name in dir(cuda):
            if not name.startswith("_") and callable(getattr(torch.cuda, name, None)):
                stack.enter_context(mock.patch.object(torch.cuda, name, getattr(cuda, name)))
        stack.enter_context(mock.patch.object(torch.version, "cuda", None if hip else "13.0"))
        stack.enter_context(mock.patch.object(torch.version, "hip", "7.0" if hip else None))
        yield cuda
