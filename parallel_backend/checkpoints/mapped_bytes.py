"""Files mapped for reading, and tensors of their bytes.

torch and safetensors make maps that may be written to, in private. Such a map counts as memory of the process: Linux refuses
it for a file that is larger than the machine's memory, and Windows counts it once for each rank.
"""

import mmap
import warnings
from typing import BinaryIO

import torch


def map_for_reading(file: BinaryIO) -> memoryview:
    """The whole file. It is unmapped once nothing refers to it any more."""
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def mapped_bytes(mapped: memoryview, start: int, count: int, name: str) -> torch.Tensor:
    """[count] uint8, a view of the map from byte `start` on. Writing to it would end the process.

    ValueError, naming the file `name`, if the map ends before that: the file has been cut since its header was read.
    """
    if start + count > len(mapped):
        raise ValueError(f"model_name: {name} has become shorter while it was read. Is it still being copied or written?")
    with warnings.catch_warnings():  # torch has no tensors that cannot be written to, and says so
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=start)
