"""Copies through host memory for Gloo transfers of CUDA tensors, because Gloo only reads and writes host memory.

Copies are page-locked if that is safe, which makes them several times faster. torch keeps page-locked memory for the next
copy of about the same size. It therefore takes as much memory as the largest set of transfers that was ever in progress.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parallel_backend.core.device_copies import host_buffer, page_locked


def staged(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether transfers of this tensor in `group` go through host memory."""
    return tensor.is_cuda and dist.is_initialized() and dist.get_backend(group) == "gloo"


def sendable(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensor that `group` sends: `tensor` itself, or a copy on the host. The copy is complete on return, because
    Gloo reads it without waiting for the device."""
    return host_buffer(tensor.shape, tensor.dtype, tensor.device).copy_(tensor) if staged(tensor, group) else tensor


def receivable(shape: Sequence[int], like: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return an uninitialised tensor that `group` can receive into, for the device and dtype of `like`."""
    return host_buffer(shape, like.dtype, like.device) if staged(like, group) else like.new_empty(shape)


def from_staging(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the received tensor on `device`."""
    if tensor.device == device:
        return tensor
    # The host does not wait for a copy from page-locked memory. torch reuses that memory only after the copy.
    return tensor.to(device, non_blocking=page_locked(device))
