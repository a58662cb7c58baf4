"""Measures copies from host memory to a GPU, whose rate determines the time of streamed weights."""

import torch

from parallel_backend.core.device_copies import host_buffer

SIZE = 64 << 20
"""Bytes of one copy: long enough for the link's full speed, some milliseconds over PCIe."""
COPIES = 4
"""Number of copies. The fastest one counts, because the first one also wakes up the link."""
SPARE = 4
"""A GPU with less free memory than SPARE times SIZE is not measured."""


def measured_copy_rate(device: torch.device) -> float:
    """Bytes per second of copies from host memory to this CUDA device. 0.0 if the device has too little free memory.

    The host memory is page-locked if this system page-locks weights.
    """
    if torch.cuda.mem_get_info(device)[0] < SPARE * SIZE:
        return 0.0
    source = host_buffer((SIZE,), torch.uint8, device)
    target = torch.empty(SIZE, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(COPIES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1000)
    return SIZE / min(seconds)
