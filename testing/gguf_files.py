"""GGUF files, as converters write them."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

TYPES = gguf.GGMLQuantizationType


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, str]],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """`tensors`: key -> (data, type). `shapes`: key -> shape in the model, if another. `texts`: further fields."""
    writer = gguf.GGUFWriter(path, arch="flux")
    for name, text in (texts or {}).items():
        writer.add_string(name, text)
    for key, shape in (shapes or {}).items():
        writer.add_array(f"comfy.gguf.orig_shape.{key}", list(shape))
    for key, (data, kind) in tensors.items():
        writer.add_tensor(key, data, raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
