"""Copies of tensors between a device and the host, for which the host waits as seldom as possible."""

import sys
from collections.abc import Sequence

import torch


def page_locked(device: torch.device) -> bool:
    """Whether copies to and from `device` are in page-locked memory.

    Not on Windows: there such copies fail once a process has looked at a second GPU (ComfyUI's issue 15255), and ComfyUI
    itself does without.
    """
    return device.type == "cuda" and sys.platform != "win32"


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU, those that are there already as they are. CUDA's copies are waited for once, all together."""
    copies, devices = [], set()
    for tensor in tensors:
        if page_locked(tensor.device):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
            devices.add(tensor.device)
        else:
            copies.append(tensor.cpu())
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def in_graph(device: torch.device) -> bool:
    """Whether what the host asks of the device now is captured in a CUDA graph, to be done again and again later."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def to_device(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None, copy: bool = False
) -> torch.Tensor:
    """The tensor on the device; as it is if it is there already and there is no `copy`. The host does not wait for what the
    device does before.

    RuntimeError in the capture of a CUDA graph.

    From memory that is not page-locked CUDA may make the host wait all the same (driver API, "API synchronization
    behavior"), so the tensor is copied into such memory first, and may be dropped at once. One that was page-locked before,
    as shared memory is, must not be written to before the device has come to the copy.
    """
    if in_graph(device) and tensor.device.type == "cpu":
        raise RuntimeError("a copy from the host would be in a CUDA graph, and read there what is no more")
    if not page_locked(device) or tensor.device.type != "cpu":
        return tensor.to(device, dtype, non_blocking=True, copy=copy)
    source = tensor if tensor.is_pinned() else tensor.pin_memory()
    return source.to(device, non_blocking=True).to(dtype or tensor.dtype)  # converted there: on the host it is unlocked
