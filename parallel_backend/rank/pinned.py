"""Memory that is shared with the client is pinned, so that a GPU reads it at the speed of its link and nobody waits."""

import logging
from collections.abc import Callable

import torch

from parallel_backend.core.device_copies import page_locked
from parallel_backend.wire.channel import Borrowed

log = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all contexts."""


def pinning(device: torch.device) -> Borrowed:
    """For a Channel: pins segments for a CUDA device where that is known to be safe, and unpins them. All else as it is."""
    return _pin(device) if page_locked(device) else lambda memory: lambda: None


def _pin(device: torch.device) -> Borrowed:
    def pin(memory: torch.Tensor) -> Callable[[], None]:
        torch.cuda.set_device(device)  # this is the thread that receives
        cudart = torch.cuda.cudart()
        failed = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
        if int(failed):
            log.warning("memory shared with the client could not be pinned (%s): it is read more slowly", failed)
            return lambda: None

        def unpin() -> None:
            torch.cuda.synchronize(device)
            cudart.cudaHostUnregister(memory.data_ptr())

        return unpin

    return pin
