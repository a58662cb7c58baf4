"""Opens safetensors and GGUF files: reads their headers, and returns their tensors as views of the mapped file."""

import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from parallel_backend.core.short_text import short
from parallel_backend.core.spans import Span

from .gguf_header import MAX_HEADER_BYTES as MAX_GGUF_HEADER_BYTES
from .gguf_header import read_gguf_header
from .packed_formats import GGUF_BLOCKS, GgufBlocks
from .quantised_formats import FP8_FORMATS, Layer

SAFETENSORS, GGUF = (".safetensors", ".sft"), (".gguf",)

MAX_HEADER_BYTES = 1 << 25
"""Maximum bytes of a safetensors header. The headers of the largest models have about a million. The safetensors library
allows a hundred million, and expands them to sixteen times as much memory."""
MAX_TENSORS = 1 << 16
"""Maximum number of tensors in a file. The largest models have several thousand."""
MAX_JSON_BYTES = 1 << 16
"""Maximum bytes of a tensor that contains JSON, which usually describes one layer."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""The first bytes of torch.save's files: a zip archive, or a bare pickle."""

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
"""Name of a dtype in safetensors -> torch's dtype."""
NAMES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}
"""Name of a dtype in safetensors or GGUF -> its name in Entry.dtype, if they differ."""
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Prefix, before a key, of a GGUF field with the real shape of a tensor that is stored in another one, as ComfyUI-GGUF
does."""
_LENGTH = struct.Struct("<Q")
"""The format of the length of the header, with which a safetensors file begins."""


class Stored(NamedTuple):
    """A tensor's bytes in its file."""

    kind: str
    """Name of its dtype, or of GGUF's block format, in the file."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """A tensor on disk, as described by its file's header."""

    key: str
    """Its key in the file, with the prefix."""
    shape: tuple[int, ...]
    """The shape of the values, not of the bytes in which they are packed."""
    dtype: str
    """fp32, bf16, fp16, fp8_e4m3fn, fp8_e5m2, one of packed_formats.GGUF_BLOCKS or of quantised_formats.KEPT, or else
    safetensors' own name."""
    layer: Layer | None = None
    """How the layer of this weight is quantized. None: it is not, or the file does not say how."""
    lacks_scale: bool = False
    """Whether the file says that its values are scaled, but has no scale."""
    pieces: "tuple[tuple[Entry, Span], ...]" = ()
    """The file's tensors and a range of rows of each that form this tensor, in order. Empty: it is one tensor of the
    file."""
    scales: "Mapping[str, Entry]" = field(default_factory=dict)
    """Other tensors of the file that belong to this weight, such as its scales, by name (quantised_layers.py)."""
    stored: Stored | None = None
    """Where a tensor of the file is."""

    @property
    def scale(self) -> "Entry | None":
        """The scale of values in fp8. None: they have none."""
        return self.scales.get("weight_scale")

    @property
    def rounded(self) -> str | None:
        """The fp8 format to which ComfyUI rounds the values before it scales them. It does so if the file names that format
        for the layer but stores the values in another one. None: they are not rounded."""
        kind = FP8_FORMATS.get(self.layer.format) if self.layer is not None else None
        return kind if kind != self.dtype else None

    @property
    def kept_layer(self) -> Layer:
        """The same as `layer`, for weights in a format of quantised_formats.KEPT: those always have a layer."""
        assert self.layer is not None
        return self.layer


class MappedFile:
    """A file that is mapped for its first tensor, and unmapped once the last one and this object are gone.

    Tensors are views of a read-only map. torch and safetensors make private writable maps, which count as memory of the
    process: Linux refuses them for a file that is larger than the machine's memory, and Windows counts them once for each
    rank.
    """

    def __init__(self, path: Path):
        self.path = path
        self._map: memoryview | None = None

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Return a view of the file as `entry.stored` has it: [rows, bytes] uint8 if `entry.dtype` is one of GGUF_BLOCKS.
        Other blocks of GGUF are expanded to float32. Writing to the view would end the process.

        Raises ValueError for a file that was cut since its header was read, and for a dtype that torch does not have."""
        assert entry.stored is not None
        kind, shape, start, nbytes = entry.stored
        if kind not in DTYPES and kind not in GGUF_BLOCKS:
            raise ValueError(f"{short(entry.key)} is stored as {short(kind, 20)}")
        if not nbytes:
            return torch.empty(shape, dtype=DTYPES[kind])
        stored = self._bytes(start, nbytes)
        if kind in DTYPES:
            return stored.view(DTYPES[kind]).view(shape)
        if entry.dtype == kind:
            return stored.view(shape[0], -1)
        return GgufBlocks(kind).expand(stored.view(1, -1), torch.float32).view(shape)

    def objects(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Return name -> the parsed JSON of its small tensor of bytes. Raises ValueError for a tensor that has no JSON."""
        with _read(self.path):
            for name, entry in entries.items():
                if entry.dtype != "U8" or len(entry.shape) != 1 or entry.shape[0] > MAX_JSON_BYTES:
                    raise ValueError(f"its entry for {short(name)} is {entry.dtype} of the shape {short(list(entry.shape))}")
            return {name: json.loads(bytes(self.tensor(entry).tolist())) for name, entry in entries.items()}

    def _bytes(self, start: int, count: int) -> torch.Tensor:
        """Return a view of `count` bytes of the map from byte `start` on, as uint8."""
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if start + count > len(self._map):
            raise ValueError(
                f"model_name: {short(self.path.name)} became shorter while it was read. Is it still being copied or written?"
            )
        with warnings.catch_warnings():  # torch warns about read-only buffers, as its tensors can always be written to
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=start)


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    path: Path
    entries: dict[str, Entry]
    """The file's tensors, by key."""
    texts: Mapping[str, str]
    """Its fields that are texts, by name."""

    def stated(self, text: str, inside: str) -> dict[str, Any]:
        """Return object `inside` of the JSON in header field `text`; empty if either is missing. Raises ValueError for other
        JSON."""
        with _read(self.path):
            outer = json.loads(self.texts.get(text, "{}"))
            inner = outer.get(inside, {}) if isinstance(outer, dict) else None
            if not isinstance(inner, dict):
                raise ValueError(f"its header has an entry {text} in an unknown form")
            return inner


def read_header(path: Path) -> Header:
    """Return a file's header. Raises ValueError with the file's name if it is damaged or incomplete, and for a GGUF file
    without the `gguf` package."""
    return _gguf_header(path) if path.suffix.lower() in GGUF else _safetensors_header(path)


def _safetensors_header(path: Path) -> Header:
    with _read(path), path.open("rb") as file:
        if len(first := file.read(_LENGTH.size)) < _LENGTH.size:
            raise ValueError("it ends before its header")
        (length,) = _LENGTH.unpack(first)
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"its header is said to have {length:,} bytes, and no model's has more than {MAX_HEADER_BYTES:,}"
            )
        # The package checks that every tensor lies within the file and has as many bytes as its shape needs.
        with safe_open(path, framework="np") as checked:
            if len(keys := checked.keys()) > MAX_TENSORS:
                raise ValueError(f"its header lists {len(keys)} tensors, more than any model has")
        header = json.loads(file.read(length))
    entries = {}
    for key in keys:
        kind, shape, (start, stop) = header[key]["dtype"], tuple(header[key]["shape"]), header[key]["data_offsets"]
        stored = Stored(kind, shape, _LENGTH.size + length + start, stop - start)
        entries[key] = Entry(key, shape, NAMES.get(kind, kind), stored=stored)
    return Header(path, entries, header.get("__metadata__") or {})


def _gguf_header(path: Path) -> Header:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ValueError(
            f"model_name: {short(path.name)} is a GGUF file. Reading it needs the Python package 'gguf': pip install gguf"
        ) from error
    entries = {}
    with _read(path):
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            header = read_gguf_header(memoryview(file.read(MAX_GGUF_HEADER_BYTES)))
        for name, tensor in header.tensors.items():
            kind = GGMLQuantizationType(tensor.kind)
            values, size = GGML_QUANT_SIZES[kind]
            nbytes = math.prod(tensor.shape) // values * size
            if (tensor.shape or (1,))[-1] % values or tensor.start + nbytes > length:
                raise ValueError(f"the values of {short(name)} are incomplete")
            shape = header.arrays.get(ORIGINAL_SHAPE + name) or tensor.shape
            if min(shape, default=1) < 1 or math.prod(shape) != math.prod(tensor.shape):
                raise ValueError(f"{short(name)} has a shape that does not match its number of values")
            entries[name] = Entry(
                name, shape, _gguf_dtype(kind.name, shape), stored=Stored(kind.name, shape, tensor.start, nbytes)
            )
    return Header(path, entries, header.texts)


def _gguf_dtype(kind: str, shape: tuple[int, ...]) -> str:
    """Return Entry.dtype. A tensor in GGUF blocks is expanded to fp32 if a row is not a whole number of blocks."""
    if kind not in GGUF_BLOCKS:
        return NAMES.get(kind, kind)
    return kind if len(shape) > 1 and math.prod(shape[1:]) % GGUF_BLOCKS[kind][0] == 0 else "fp32"


@contextmanager
def _read(path: Path) -> Iterator[None]:
    """Context whose errors become a ValueError that names the file."""
    try:
        yield
    except (SafetensorError, KeyError, OSError, ValueError, RecursionError) as error:
        if _is_pickle(path):
            raise ValueError(
                f"model_name: {short(path.name)} is a pickle file under another name. Pickles can run any code and are "
                "never opened. Get the model as safetensors."
            ) from None
        raise ValueError(
            f"model_name: {short(path.name)} cannot be read. It is damaged or incomplete ({short(error, 200)})."
        ) from None


def _is_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(PICKLES)
    except OSError:
        return False
