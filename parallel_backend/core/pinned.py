"""Pins existing host memory, so that a GPU copies from and to it at the speed of its link and the host does not wait."""

import contextlib
import logging
from collections.abc import Callable

import torch

from .device_copies import page_locked

log = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all contexts."""


def pin(memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
    """Pin a tensor's memory for a CUDA device. Returns a function that unpins it. None: it is not pinned, because the driver
    refused or copies for this device use no pinned memory (page_locked).

    The returned function waits for the device, so only the thread that computes on it may call it: CUDA forbids
    synchronizing while another thread captures a graph.
    """
    if not memory.nbytes or not page_locked(device):
        return None
    with torch.cuda.device(device):  # a thread begins with device 0, and would make a context there
        cudart = torch.cuda.cudart()
        failed = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
        if int(failed):
            log.warning(
                "%.2f GB of host memory could not be pinned (%s): it is copied more slowly", memory.nbytes / 1e9, failed
            )
            _forget_error(device)
            return None

    def unpin() -> None:
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            cudart.cudaHostUnregister(memory.data_ptr())

    return unpin


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which torch would raise at the next kernel, by launching one here. Waits only for this
    thread's stream, because another thread may be capturing a graph."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
        torch.cuda.current_stream(device).synchronize()
