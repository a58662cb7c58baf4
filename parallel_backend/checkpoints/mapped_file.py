"""Files mapped for reading, and tensors of their bytes.

torch and safetensors make private writable maps, which count as memory of the process: Linux refuses them for a file that is
larger than the machine's memory, and Windows counts them once for each rank.
"""

import mmap
import warnings
from pathlib import Path
from typing import BinaryIO, Self

import torch

from parallel_backend.core.short_text import short


class MappedFile:
    """A file whose tensors are views of a read-only map. The file is unmapped once the last tensor is gone."""

    def __init__(self, path: Path):
        self.path = path
        self._map: memoryview | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map = None

    def _map_whole(self, file: BinaryIO) -> None:
        self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _bytes(self, start: int, count: int) -> torch.Tensor:
        """[count] uint8, a view of the map from byte `start` on. Writing to it would end the process.

        ValueError, naming the file, if the map ends too soon: the file has been cut since its header was read.
        """
        assert self._map is not None
        if start + count > len(self._map):
            raise ValueError(
                f"model_name: {short(self.path.name)} became shorter while it was read. Is it still being copied or written?"
            )
        with warnings.catch_warnings():  # torch warns about read-only buffers, as its tensors can always be written to
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=start)
