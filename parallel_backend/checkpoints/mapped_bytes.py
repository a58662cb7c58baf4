"""Files mapped for reading, and tensors of their bytes.

torch and safetensors make private writable maps, which count as memory of the process: Linux refuses them for a file that is
larger than the machine's memory, and Windows counts them once for each rank.
"""

import mmap
import warnings
from typing import BinaryIO

import torch


def map_for_reading(file: BinaryIO) -> memoryview:
    """The whole file. It is unmapped once no view refers to it."""
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def mapped_bytes(mapped: memoryview, start: int, count: int, name: str) -> torch.Tensor:
    """[count] uint8, a view of the map from byte `start` on. Writing to it would end the process.

    ValueError, naming the file `name`, if the map ends too soon: the file has been cut since its header was read.
    """
    if start + count > len(mapped):
        raise ValueError(f"model_name: {name} has become shorter while it was read. Is it still being copied or written?")
    with warnings.catch_warnings():  # torch warns about read-only buffers, as its tensors can always be written to
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=start)
