"""torch.cuda for hollow devices: streams and events that order nothing, since sizes alone are counted, and memory."""

import contextlib
import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .account import Account

MEMORY = 1 << 42
"""Bytes of a device: more than any case takes, so that nothing is streamed."""
CAPABILITY = (9, 0)
LIBRARY, GUARDS = "libc10.so", "_ZN3c104impl26device_guard_impl_registryE"
CUDA, META = 1, 14
"""Numbers of c10::DeviceType."""


class HollowCuda:
    """What stands in for torch.cuda's functions of the same names."""

    def __init__(self, accounts: Sequence[Account]):
        self.accounts = accounts
        self._here = threading.local()  # the current device is each thread's

    def current_device(self) -> int:
        return getattr(self._here, "index", 0)

    def set_device(self, device: Any) -> None:
        self._here.index = self._index(device)

    def _index(self, device: Any) -> int:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index

    def _account(self, device: Any) -> Account:
        return self.accounts[self._index(device)]

    def stop(self, device: Any, where: str) -> None:
        self._account(device).stops[where] += 1

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By name."""

        def stats(device: Any = None) -> dict[str, int]:
            allocated = self._account(device).allocated
            names = ("active_bytes", "allocated_bytes", "reserved_bytes")
            return defaultdict(int, {f"{name}.all.current": allocated for name in names})

        def properties(device: Any = None) -> SimpleNamespace:
            uuid = f"GPU-00000000-0000-0000-0000-{self._index(device):012}"
            major, minor = CAPABILITY
            return SimpleNamespace(name="hollow", major=major, minor=minor, total_memory=MEMORY, uuid=uuid)

        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.accounts),
            "current_device": self.current_device,
            "set_device": self.set_device,
            "get_device_name": lambda device=None: "hollow",
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_properties": properties,
            "mem_get_info": lambda device=None: (MEMORY - self._account(device).allocated, MEMORY),
            "memory_allocated": lambda device=None: self._account(device).allocated,
            "memory_reserved": lambda device=None: self._account(device).allocated,
            "max_memory_allocated": lambda device=None: self._account(device).peak,
            "memory_stats": stats,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda device=None: self.stop(device, "synchronize"),
            "Event": type("Event", (Event,), {"__init__": lambda event, **_: Event.__init__(event, self)}),
            "Stream": type(
                "Stream", (Stream,), {"__init__": lambda new, device=None, **_: Stream.__init__(new, self, device)}
            ),
            "current_stream": lambda device=None: Stream(self, device),
            "stream": lambda stream: contextlib.nullcontext(),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        }


class Event:
    """Over as soon as it is recorded."""

    def __init__(self, cuda: HollowCuda):
        self._cuda, self._device = cuda, cuda.current_device()

    def record(self, stream: "Stream | None" = None) -> None:
        self._device = self._cuda.current_device()

    def wait(self, stream: "Stream | None" = None) -> None:
        """Nothing is late."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._cuda.stop(self._device, "an event")

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


class Stream:
    def __init__(self, cuda: HollowCuda, device: Any = None):
        self._cuda, self._device = cuda, device

    def wait_stream(self, other: "Stream") -> None:
        """Nothing is late."""

    def wait_event(self, event: Event) -> None:
        """Nothing is late."""

    def synchronize(self) -> None:
        self._cuda.stop(self._device, "a stream")


def _set_device_guard() -> None:
    """A build without CUDA has no guard for its devices, and indexing asks for one: the meta device's does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARY))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, GUARDS)
    assert guards[META], "this torch has its device guards elsewhere"
    guards[CUDA] = guards[CUDA] or guards[META]


@contextlib.contextmanager
def hollow_cuda(accounts: Sequence[Account]) -> Iterator[None]:
    """Within it torch.cuda has a device for each account. Tensors on them are made on threads in `Devices`."""
    _set_device_guard()
    cuda = HollowCuda(accounts)
    with contextlib.ExitStack() as stack:
        for name, function in cuda.functions().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: False))
        yield
