"""Safetensors files: their values, as views of a read-only map of the file.

The safetensors package checks a file. Its tensors for torch would count as the process's memory, see mapped_file.py.
"""

import json
import struct
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open

from parallel_backend.core.short_text import short

from .mapped_file import MappedFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on; diffusers takes 2.6
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
"""Safetensors' name -> torch's dtype."""
_LENGTH = struct.Struct("<Q")
"""A file begins with the length of its header."""
MAX_HEADER_BYTES = 1 << 25
"""Most bytes of a header. Those of the largest models have about a million. The safetensors library takes a hundred million,
and unfolds them to sixteen times as much memory."""


def read_header_length(file: BinaryIO) -> int:
    """Bytes of the header of the file, which is read from its beginning. ValueError for more than MAX_HEADER_BYTES."""
    if len(first := file.read(_LENGTH.size)) < _LENGTH.size:
        raise ValueError("it ends before its header")
    (length,) = _LENGTH.unpack(first)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header is said to have {length:,} bytes, and no model's has more than {MAX_HEADER_BYTES:,}")
    return length


class SafetensorsFile(MappedFile):
    """An opened file."""

    def __init__(self, path: Path):
        """SafetensorError or ValueError for a file that is damaged or incomplete."""
        super().__init__(path)
        with path.open("rb") as file:
            length = read_header_length(file)
            with safe_open(path, framework="np"):
                pass  # opening checks that every tensor lies within the file and has as many bytes as its shape needs
            self._header = json.loads(file.read(length))
            self._map_whole(file)
        self._start = _LENGTH.size + length

    def get_tensor(self, key: str) -> torch.Tensor:
        """A view of the map. ValueError for a dtype that torch does not have."""
        entry = self._header[key]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{short(key)} is stored as {short(entry['dtype'], 20)}")
        dtype, (start, stop) = DTYPES[entry["dtype"]], entry["data_offsets"]
        if start == stop:
            return torch.empty(entry["shape"], dtype=dtype)
        return self._bytes(self._start + start, stop - start).view(dtype).view(entry["shape"])
