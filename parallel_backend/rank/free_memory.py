"""How much memory a rank can still have: of its GPU, or of the machine."""

import platform

import torch

from parallel_backend.core.host_memory import host_memory
from parallel_backend.wire.diagnosis import DeviceMemoryReport


def read_memory(
    rank: int, device: torch.device, held: int, others: int = 0, copy_rate: float = 0.0, vae: int = 0
) -> DeviceMemoryReport:
    """`held`: bytes that the rank's model has on a CPU; a CUDA device knows itself what this process holds, which less
    `others`, those of other models, and `vae`, those of parts of VAEs, counts as the model's.
    `copy_rate`: see DeviceMemoryReport.
    """
    node = platform.node()
    if device.type != "cuda":
        free, total = host_memory()
        return DeviceMemoryReport(rank, node, free, held, 0, total)
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    # By the card's own number: two processes may each call another card cuda:0.
    place = f"{node} {getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"
    cached, host_free = torch.cuda.memory_reserved(device) - allocated, host_memory()[0]
    return DeviceMemoryReport(rank, place, free, allocated - others - vae, cached, total, node, host_free, copy_rate, vae)
