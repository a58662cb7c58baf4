"""Page-locked memory of the host, and copies between it and a device that take their time.

A tensor in such memory is a HostTensor from when it is made, or from the first copy to it if its memory was registered: so
the host's reads of what has not come are seen. Those of other processes, and by Gloo, are not: they get POISON.
"""

import bisect
import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from testing.thread_ranks import RankThread

from .machine import machine
from .operators import leaves, mutated_by, operator_of
from .streams import Stream

PAGE = 4096
ALREADY, NOT_REGISTERED, NO_MEMORY = 712, 713, 2
"""cudaErrorHostMemoryAlreadyRegistered, cudaErrorHostMemoryNotRegistered, cudaErrorMemoryAllocation."""
LARGE = 16 << 20
"""Sources of copies above so many bytes are not compared with what they were."""
POISON = 0xFF
"""In memory that a copy has not yet come to: a NaN in every floating dtype."""
HANDED_OUT = ("numpy", "__array__", "__dlpack__", "tolist")
"""Methods by which values leave torch without an operator."""


class PageLocked:
    """Ranges of host memory that are page-locked. `budget`: bytes that the driver page-locks at most."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, bool]] = {}  # start -> (bytes, registered by hand)
        self._ranks: dict[int, RankThread] = {}  # start -> the rank that registered it, if it is a thread
        self._lock = threading.RLock()
        self.budget: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self._ranges.values())

    @property
    def registered(self) -> int:
        """Bytes that were registered by hand, but for ranks that have ended: a process takes its own with it."""
        self._forget_the_dead()
        return sum(size for size, by_hand in self._ranges.values() if by_hand)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in page-locked memory, which stays so as long as anything lies in it."""
        count = int(numpy.prod(shape, dtype=numpy.int64)) * torch.empty(0, dtype=dtype).element_size()
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        if not self._room(count):
            raise RuntimeError("CUDA error: out of memory")
        memory = numpy.empty(count, numpy.uint8)  # torch keeps it until the storage's end, and Python says when that is
        address = memory.ctypes.data
        self._add(address, count, False)
        weakref.finalize(memory, self._remove, address)
        return watched(torch.from_numpy(memory).view(dtype).view(tuple(shape)))

    def has(self, tensor: torch.Tensor) -> bool:
        address = torch._C.TensorBase.data_ptr(plain(tensor))
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            return at >= 0 and address < self._starts[at] + self._ranges[self._starts[at]][0]

    def register(self, address: int, size: int, _flags: int) -> int:
        """cudaHostRegister. Whole pages are locked, and none twice."""
        first, last = address // PAGE, (address + size - 1) // PAGE
        self._forget_the_dead()
        with self._lock:
            for start, (length, by_hand) in self._ranges.items():
                if by_hand and first <= (start + length - 1) // PAGE and start // PAGE <= last:
                    return ALREADY
            if not self._room(size):
                return NO_MEMORY
            self._add(address, size, True)
        return 0

    def unregister(self, address: int) -> int:
        """cudaHostUnregister."""
        with self._lock:
            size, by_hand = self._ranges.get(address, (0, False))
            if not by_hand:
                return NOT_REGISTERED
            self._remove(address)
        with machine.lock:
            for of in machine.gpus:
                for entry in of.pending:
                    if entry.overlaps(address, size):
                        machine.record.violation(f"memory is no longer page-locked while a copy uses it: {entry}")
        return 0

    def _forget_the_dead(self) -> None:
        with self._lock:
            for start in [start for start, rank in self._ranks.items() if not rank.is_alive()]:
                self._remove(start)

    def _room(self, size: int) -> bool:
        return self.budget is None or self.nbytes + size <= self.budget

    def _add(self, address: int, size: int, by_hand: bool) -> None:
        with self._lock:
            bisect.insort(self._starts, address)
            self._ranges[address] = size, by_hand
            if by_hand and isinstance(thread := threading.current_thread(), RankThread):
                self._ranks[address] = thread
            machine.note_registered(self.registered)

    def _remove(self, address: int) -> None:
        with self._lock:
            self._ranks.pop(address, None)
            if self._ranges.pop(address, None) is not None:
                self._starts.remove(address)
                machine.note_registered(self.registered)


page_locked = PageLocked()


class PendingCopy:
    """A copy of which the host does not know that it is over. `tensor`: the host's, which is contiguous."""

    def __init__(self, stream: Stream, tensor: torch.Tensor, what: str, where: str):
        self.stream, self.tick, self.tensor = stream, stream.tick, plain(tensor)
        self._what, self._where = what, where

    def overlaps(self, address: int, size: int) -> bool:
        start = self.tensor.data_ptr()
        return address < start + self.tensor.nbytes and start < address + size

    def over(self) -> None:
        """The host has waited for it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self._what}, begun at {self._where}"


class Upload(PendingCopy):
    """A copy to the device: its source may not change until it is over."""

    def __init__(self, stream: Stream, source: torch.Tensor, where: str):
        super().__init__(stream, source, "a copy to the device", where)
        with torch.inference_mode():
            self._before = bytes_of(self.tensor).clone() if source.nbytes < LARGE else None

    def over(self) -> None:
        if self._before is not None and not torch.equal(bytes_of(self.tensor), self._before):
            machine.record.violation(f"page-locked memory was changed under {self}")


class Download(PendingCopy):
    """A copy to the host: its values are there when the host has waited for it, and poison until then."""

    def __init__(self, stream: Stream, target: torch.Tensor, values: torch.Tensor, where: str):
        super().__init__(stream, target, "a copy to the host", where)
        self._values = values
        with torch.inference_mode():
            bytes_of(self.tensor).fill_(POISON)
        watched(target)

    def over(self) -> None:
        with torch.inference_mode():
            if not bool((bytes_of(self.tensor) == POISON).all()):
                machine.record.violation(f"page-locked memory was changed under {self}")
            self.tensor.copy_(self._values)


class HostTensor(torch.Tensor):
    """A tensor in page-locked memory. A read by the host of what a copy has not yet brought is a violation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        awaited = [entry for of in machine.gpus for entry in of.pending if isinstance(entry, Download)]
        with torch._C.DisableTorchFunctionSubclass(), _Reads(awaited) if awaited else contextlib.nullcontext():
            if getattr(func, "__name__", "") in HANDED_OUT:
                _note_read(args[0], awaited)
            found = func(*args, **(kwargs or {}))
        for each in leaves([found]):
            if each.device.type == "cpu" and page_locked.has(each):
                watched(each)
        return found


class _Reads(TorchDispatchMode):
    """Notes what the operators of this thread read of what `awaited` has not yet brought."""

    def __init__(self, awaited: "list[Download]"):
        super().__init__()
        self._awaited = awaited

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        about, tensors = operator_of(func), [*leaves(args), *leaves(kwargs.values())]
        to_device = any(tensor.is_cuda for tensor in tensors) or torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not (about.view or about.like or to_device):  # the last are the device's to read: tensors.py sees them
            written = list(map(id, mutated_by(func, args, kwargs)))
            for tensor in tensors:
                if id(tensor) not in written:
                    _note_read(tensor, self._awaited)
        return func(*args, **kwargs)


def _note_read(tensor: torch.Tensor, awaited: "list[Download]") -> None:
    tensor = plain(tensor)
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    for entry in awaited:
        if entry.overlaps(tensor.data_ptr(), extent * tensor.element_size()):
            machine.record.violation(f"the host reads memory that has not come: {entry}")


def watched(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, a HostTensor from now on if it has no class of its own."""
    if type(tensor) is torch.Tensor:
        tensor.__class__ = HostTensor
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Another one with the same values, which nobody watches."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous tensor as bytes, in the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def patched_empty(real: Any) -> Any:
    """torch.empty with `pin_memory`."""

    def empty(*shape: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if not pin_memory:
            return real(*shape, **named)
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return page_locked.empty(tuple(sizes), named.get("dtype") or torch.get_default_dtype())

    return empty


def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """torch.Tensor.pin_memory of a CPU tensor."""
    if page_locked.has(tensor):
        return tensor
    made = page_locked.empty(tensor.shape, tensor.dtype)
    with torch.inference_mode(made.is_inference()):
        return made.copy_(tensor.detach())
