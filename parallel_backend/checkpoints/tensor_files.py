"""Tensor files, safetensors and GGUF: their headers, and slices of their tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span

from .gguf_file import GgufFile
from .quantised_formats import FP8_FORMATS, Layer
from .safetensors_file import SafetensorsFile, read_header_length

SAFETENSORS, GGUF = (".safetensors", ".sft"), (".gguf",)
QUANTISATION = "_quantization_metadata"
"""Entry of a safetensors header in which ComfyUI's files may name the formats of quantised layers (JSON)."""

MAX_TENSORS = 1 << 16
"""Most tensors of a file. The largest models have some thousand."""
MAX_JSON_BYTES = 1 << 16
"""Most bytes of a tensor of JSON, which is about one layer."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of torch.save's files: a zip archive, or a bare pickle."""

_SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}


@dataclass(frozen=True)
class Entry:
    """A tensor on disk, as its file's header describes it."""

    file: Path
    key: str
    """In the file, with its prefix."""
    shape: tuple[int, ...]
    """Of the values, not of the bytes in which they are packed."""
    dtype: str
    """fp32, bf16, fp16, fp8_e4m3fn, fp8_e5m2, one of packed_formats.GGUF_BLOCKS or of quantised_formats.KEPT, or
    safetensors' own name."""
    layer: Layer | None = None
    """How the layer of this weight is quantised. None: it is not, or the file does not say it."""
    lacks_scale: bool = False
    """The file says that its values are scaled, and has no scale."""
    pieces: "tuple[tuple[Entry, Span], ...]" = ()
    """The tensors of the file, and the rows of each, that make up this one in order. Empty: it is a tensor of the file."""
    scales: "Mapping[str, Entry]" = field(default_factory=dict)
    """By name, the tensors of the file that belong to this weight (quantised_layers.py): its scales and others."""

    @property
    def scale(self) -> "Entry | None":
        """The scale of values in fp8."""
        return self.scales.get("weight_scale")

    @property
    def rounded(self) -> str | None:
        """The kind of fp8 to which the values are rounded before they are scaled: the file says that the layer is of that
        kind, and stores it in another format. ComfyUI rounds them so. None: they are not rounded."""
        kind = FP8_FORMATS.get(self.layer.format) if self.layer is not None else None
        return kind if kind != self.dtype else None

    @property
    def kept_layer(self) -> Layer:
        """`layer` of a weight in one of quantised_formats.KEPT."""
        assert self.layer is not None
        return self.layer


def open_file(path: Path) -> GgufFile | SafetensorsFile:
    """The memory-mapped file. `get_tensor(key)` is a view of it, of bytes if `Entry.dtype` is one of GGUF_BLOCKS.

    ValueError for a damaged file, such as one that another program has overwritten since it was checked.
    """
    if _is_gguf(path):
        return GgufFile(path)
    try:
        return SafetensorsFile(path)
    except (SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() in GGUF


Header = tuple[dict[str, Entry], dict[str, dict[str, Any]], dict[str, Any] | None]
"""Key -> entry; layer -> settings of its quantisation, where the header has them; the transformer's configuration in the
header's field `config`, as in Lightricks' files: empty if there is none, None if it is no such JSON."""


def read_header(path: Path) -> Header:
    """The header of a file. ValueError for an unreadable one."""
    if _is_gguf(path):
        with GgufFile(path) as file:
            entries = {key: Entry(path, key, file.shape(key), file.dtype(key)) for key in file.keys()}  # noqa: SIM118
            return entries, {}, _stated_config(file.texts)

    def read(file: Any) -> Header:
        if len(names := file.keys()) > MAX_TENSORS:
            raise ValueError(f"it says that it has {len(names)} tensors")
        keys = {key: file.get_slice(key) for key in names}
        entries = {
            key: Entry(path, key, tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype()))
            for key, part in keys.items()
        }
        texts = file.metadata() or {}
        settings = {layer: _object(value) for layer, value in _inner_object(texts, QUANTISATION, "layers").items()}
        return entries, settings, _stated_config(texts)

    return _reading(path, read)


def _stated_config(texts: Mapping[str, str]) -> dict[str, Any] | None:
    try:
        return _inner_object(texts, "config", "transformer")
    except (ValueError, RecursionError):  # ComfyUI reads it for some models alone
        return None


def read_settings(entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """Layer -> settings of its quantisation, from a small tensor of JSON bytes for each layer."""
    return read_json(entries, _object)


def read_json(entries: Mapping[str, Entry], check: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
    """Name -> what its small tensor of JSON bytes says, as `check` gives it. ValueError for a tensor that has none."""
    values: dict[str, Any] = {}
    for path in {entry.file for entry in entries.values()}:
        keys = {name: entry for name, entry in entries.items() if entry.file == path}

        def read(file: Any, keys: dict[str, Entry] = keys) -> dict[str, Any]:
            for name, entry in keys.items():
                if entry.dtype != "U8" or len(entry.shape) != 1 or entry.shape[0] > MAX_JSON_BYTES:
                    raise ValueError(f"its entry for {short(name)} is {entry.dtype} of the shape {short(list(entry.shape))}")
            return {name: check(json.loads(bytes(file.get_tensor(entry.key).tolist()))) for name, entry in keys.items()}

        values |= _reading(path, read)
    return values


def _inner_object(texts: Mapping[str, str], entry: str, inside: str) -> dict[str, Any]:
    """Object `inside` of the JSON object in an entry of a header. Empty if either is missing."""
    outer = json.loads(texts.get(entry, "{}"))
    inner = outer.get(inside, {}) if isinstance(outer, dict) else None
    if not isinstance(inner, dict):
        raise ValueError(f"its header says {entry} in an unknown form")
    return inner


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a layer's format is not a JSON object")
    return value


def _reading(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with path.open("rb") as file:
            read_header_length(file)
        with safe_open(path, framework="np") as file:  # for torch it would map more than a header needs
            return read(file)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    if _is_pickle(path):
        return ValueError(
            f"model_name: {short(path.name)} is a pickle file under another name. Pickles can run any code and are never "
            "opened. Get the model as safetensors."
        )
    return ValueError(f"model_name: {short(path.name)} cannot be read. It is damaged or incomplete ({short(error, 200)}).")


def _is_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(PICKLES)
    except OSError:
        return False
