"""Files that hold tensors, safetensors and GGUF: what is in them, known from the header, and slices of it."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .gguf_file import GgufFile

SAFETENSORS, GGUF = (".safetensors", ".sft"), (".gguf",)
QUANTISATION = "_quantization_metadata"
"""Entry of a safetensors header in which ComfyUI's files may say how their layers are quantised (JSON)."""

_SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}


@dataclass(frozen=True)
class Entry:
    """A tensor on disk, known from its file's header. `scale`: what its values are to be multiplied with (scales.py)."""

    file: Path
    key: str  # in the file, prefix included
    shape: tuple[int, ...]  # of the values, however they are packed
    dtype: str  # fp32, bf16, fp16, fp8_e4m3fn, fp8_e5m2, one of packings.BLOCKS, or safetensors' own name
    scale: "Entry | None" = None


def open_file(path: Path) -> AbstractContextManager[Any]:
    """The file, memory-mapped: `get_slice(key)[...]` is a tensor, of packings.BLOCKS' bytes where the entry says so."""
    return GgufFile(path) if path.suffix.lower() in GGUF else safe_open(path, framework="pt")


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Key -> entry; layer -> format, as far as the header names formats. ValueError for a file that cannot be read."""
    if path.suffix.lower() in GGUF:
        with GgufFile(path) as file:
            return {key: Entry(path, key, file.shape(key), file.dtype(key)) for key in file.keys()}, {}  # noqa: SIM118

    def read(file: Any) -> tuple[dict[str, Entry], dict[str, str]]:
        keys = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        entries = {
            key: Entry(path, key, tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype()))
            for key, part in keys.items()
        }
        stated = json.loads((file.metadata() or {}).get(QUANTISATION, "{}")).get("layers", {})
        return entries, {layer: str(how.get("format")) for layer, how in stated.items()}

    return _reading(path, read)


def read_stated_config(path: Path) -> dict[str, Any]:
    """What a single file's header says of its transformer beside the weights, as Lightricks' files do."""
    if path.suffix.lower() in GGUF:
        return {}
    return _reading(path, lambda file: json.loads((file.metadata() or {}).get("config", "{}")).get("transformer", {}))


def read_json(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """What small tensors of bytes say."""
    said = {}
    for path in {entry.file for entry in entries.values()}:
        keys = {name: entry.key for name, entry in entries.items() if entry.file == path}

        def read(file: Any, keys: dict[str, str] = keys) -> dict[str, Any]:
            return {name: json.loads(bytes(file.get_tensor(key).tolist())) for name, key in keys.items()}

        said |= _reading(path, read)
    return said


def _reading(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with open_file(path) as file:
            return read(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"model_name: {path.name} cannot be read; it is damaged or incomplete ({error}).") from error
