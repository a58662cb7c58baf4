"""torch.cuda for hollow devices: streams and events that order nothing, since sizes alone are counted, and memory."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from testing.fake_cuda import Card, FakeCuda, FakeStream, replaced

from .account import Account

CARD = Card("hollow", (9, 0), 1 << 42)
"""It has more memory than any case takes, so that nothing is streamed."""
LIBRARY, GUARDS = "libc10.so", "_ZN3c104impl26device_guard_impl_registryE"
CUDA, META = 1, 14
"""Numbers of c10::DeviceType."""


class HollowStream(FakeStream):
    def wait_stream(self, other: FakeStream) -> None:
        """Nothing is late."""

    def wait_event(self, event: object) -> None:
        """Nothing is late."""


class HollowCuda(FakeCuda):
    """What stands in for torch.cuda's functions of the same names. Memory is what the accounts have."""

    def __init__(self, accounts: Sequence[Account]):
        super().__init__((CARD,) * len(accounts))
        self.accounts = accounts

    def run_to(self, device: int, at: float) -> None:
        self.accounts[device].stops += 1

    def free(self, device: int = 0) -> int:
        return CARD.memory - self.accounts[device].allocated

    def memory_allocated(self, device: Any = None) -> int:
        return self.accounts[self._index(device)].allocated

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.accounts[self._index(device)].peak

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return False

    def Stream(self, device: Any = None, **_: Any) -> HollowStream:
        return HollowStream(self, self._index(device))

    def current_stream(self, device: Any = None) -> HollowStream:
        return self.Stream(device)

    def stream(self, stream: HollowStream) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


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
    with replaced(HollowCuda(accounts)), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: False))
        yield
