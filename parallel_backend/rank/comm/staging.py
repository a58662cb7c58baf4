"""Gloo moves host memory only: tensors of a CUDA device go through a copy in host memory on either side.

The copies are in page-locked memory where that is safe, several times as fast as others. torch keeps such memory for the
next one of about its size, and each transfer has one copy at each end: as much is held as is ever under way at once.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parallel_backend.core.device_copies import page_locked


def staged(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether transfers of this tensor in `group` go through host memory. A rank that is alone has no group."""
    return tensor.is_cuda and dist.is_initialized() and dist.get_backend(group) == "gloo"


def transfer_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of `device` are when `group` moves them: on the device itself, or on the host."""
    return torch.device("cpu") if device.type == "cuda" and dist.get_backend(group) == "gloo" else device


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room on the host for what is received for `device`; its values are whatever was there."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=page_locked(device))


def to_staging(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is complete when this returns: Gloo reads it without asking the device."""
    return host_buffer(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def from_staging(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What has been received, on `device`; itself where it is there.

    From page-locked memory the host does not wait for the copy, and torch hands that memory out again after it.
    """
    return tensor.to(device, non_blocking=page_locked(device))
