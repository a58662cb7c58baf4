"""Files of which only the header is written."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] = {}) -> Path:
    """A bf16 file of tensors with these names and shapes. The values are a hole that takes no disk: all read as 0."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, shape in shapes.items():
        stop = start + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + start)
    return path
