"""Memory that a GPU is to read at the speed of its link, while nobody waits, is pinned where it lies."""

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
    """For a Channel, and for weights: pins memory for a CUDA device where that is known to be safe, and unpins it. Memory
    for all else, or that cannot be pinned, is as it is."""
    return _pin(device) if page_locked(device) else lambda memory: lambda: None


def _pin(device: torch.device) -> Borrowed:
    def pin(memory: torch.Tensor) -> Callable[[], None]:
        if not memory.nbytes:
            return lambda: None
        torch.cuda.set_device(device)  # this may be the thread that receives: see unpin
        cudart = torch.cuda.cudart()
        failed = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
        if int(failed):
            log.warning(
                "%.2f GB of host memory could not be pinned (%s): it is read more slowly", memory.nbytes / 1e9, failed
            )
            _forget_error(device)
            return lambda: None

        def unpin() -> None:
            # By the thread that computes: CUDA forbids waiting for a device on which another one captures a graph.
            torch.cuda.synchronize(device)
            cudart.cudaHostUnregister(memory.data_ptr())

        return unpin

    return pin


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a failed call, and torch would take it for that of the next kernel, and raise it there.

    The thread's own stream alone is waited for: another thread may be capturing a graph.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
        torch.cuda.current_stream(device).synchronize()
