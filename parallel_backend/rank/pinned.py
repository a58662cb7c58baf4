"""Pins existing host memory, so that a GPU copies from it at the speed of its link and the host does not wait."""

import contextlib
import logging
from collections.abc import Callable

import torch

from parallel_backend.core.device_copies import page_locked
from parallel_backend.wire.channel import Borrowed

log = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all contexts."""


def pinning(device: torch.device) -> Borrowed:
    """A function that pins a tensor's memory for a CUDA device and returns a function that unpins it.

    It does nothing for other devices, on Windows (see page_locked), or to memory that cannot be pinned.
    """
    return _pin(device) if page_locked(device) else lambda memory: lambda: None


def _pin(device: torch.device) -> Borrowed:
    def pin(memory: torch.Tensor) -> Callable[[], None]:
        if not memory.nbytes:
            return lambda: None
        torch.cuda.set_device(device)  # the receiving thread also calls this, and a thread begins with device 0
        cudart = torch.cuda.cudart()
        failed = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
        if int(failed):
            log.warning(
                "%.2f GB of host memory could not be pinned (%s): it is read more slowly", memory.nbytes / 1e9, failed
            )
            _forget_error(device)
            return lambda: None

        def unpin() -> None:
            # Only by the computing thread: CUDA forbids synchronising a device while another thread captures a graph.
            torch.cuda.synchronize(device)
            cudart.cudaHostUnregister(memory.data_ptr())

        return unpin

    return pin


def _forget_error(device: torch.device) -> None:
    """Clears CUDA's last error, which torch would raise at the next kernel, by launching one here.

    Waits for this thread's stream only: another thread may be capturing a graph.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
        torch.cuda.current_stream(device).synchronize()
