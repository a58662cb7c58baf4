"""Headers of model files, and sparse files: a header, and behind it as much of nothing as it says."""

import struct
from pathlib import Path
from typing import Any

import torch

LARGEST = 1 << 36
"""Of a file, in bytes of nothing: tmpfs and ext4 have no larger sparse ones."""
ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8, "F64": 8}


def safetensors_header(shapes: dict[str, list[int]], dtype: str, metadata: dict[str, str]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for key, shape in shapes.items():
        size = ITEM[dtype] * torch.Size(shape).numel()
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


def write_sparse(path: Path, header: bytes, length: int, size: int) -> Path:
    """`length`: what the file says of its header. `size`: of the tensors behind it."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length % 2**64))
        file.write(header)
        file.truncate(min(max(8 + len(header) + size, 0), LARGEST))
    return path
