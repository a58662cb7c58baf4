"""Reads the free memory of a rank's device: of its GPU, or of the machine."""

import platform

import torch

from parallel_backend.core.host_memory import host_memory, room_for_weights
from parallel_backend.wire.diagnosis import DeviceMemoryReport


def read_memory(
    rank: int, device: torch.device, held: int, others: int = 0, copy_rate: float = 0.0, vae: int = 0
) -> DeviceMemoryReport:
    """Return the memory report for one of the rank's models.

    `held`: the model's bytes, used on a CPU. On CUDA the model's bytes are those that this process has allocated, minus
    `others` (other models and their runs) and `vae` (parts of VAEs). `copy_rate`: see DeviceMemoryReport.
    """
    node = platform.node()
    free, total = device_memory(device)
    if device.type != "cuda":
        return DeviceMemoryReport(rank, node, free, held, 0, total)
    allocated = torch.cuda.memory_allocated(device)
    # By the card's UUID: cuda:0 may be another card in another process.
    place = f"{node} {getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"
    cached, host_free = torch.cuda.memory_reserved(device) - allocated, max(0, room_for_weights(device))
    return DeviceMemoryReport(rank, place, free, allocated - others - vae, cached, total, node, host_free, copy_rate, vae)


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free bytes, all bytes) of the device; on a CPU, of the machine. Raises RuntimeError if the device has failed."""
    return host_memory() if device.type != "cuda" else torch.cuda.mem_get_info(device)
