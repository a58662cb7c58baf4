"""Tensor files, safetensors and GGUF: their headers, and their tensors as views of the mapped file."""

import abc
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
from typing import Any, Self

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
"""Maximum bytes of a safetensors header. Those of the largest models have about a million. The safetensors library takes a
hundred million, and unfolds them to sixteen times as much memory."""
MAX_TENSORS = 1 << 16
"""Maximum number of tensors of a file. The largest models have some thousand."""
MAX_JSON_BYTES = 1 << 16
"""Maximum number of bytes of a tensor of JSON, which is about one layer."""
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of torch.save's files: a zip archive, or a bare pickle."""

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
NAMES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}
"""Safetensors' or GGUF's name -> Entry.dtype, if it is another one."""
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Field of a GGUF file, before a key: the real shape of a tensor stored in another one, as ComfyUI-GGUF writes it."""
_LENGTH = struct.Struct("<Q")
"""A safetensors file begins with the length of its header."""


@dataclass(frozen=True)
class Entry:
    """A tensor on disk, as its file's header describes it."""

    key: str
    """In the file, with its prefix."""
    shape: tuple[int, ...]
    """Shape of the values, not of the bytes in which they are packed."""
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
    """Other tensors of the file that belong to this weight, such as its scales, by name (quantised_layers.py)."""

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


class MappedFile(abc.ABC):
    """An opened file. It is mapped for its first tensor, and unmapped once the last one is gone.

    Tensors are views of a read-only map. torch and safetensors make private writable maps, which count as memory of the
    process: Linux refuses them for a file that is larger than the machine's memory, and Windows counts them once for each
    rank.
    """

    entries: dict[str, Entry]
    """The file's tensors, by key."""
    texts: Mapping[str, str]
    """Fields of its header that are texts, by name."""

    def __init__(self, path: Path):
        """ValueError, naming the file, if it is damaged or incomplete."""
        self.path = path
        self._map: memoryview | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map = None

    @abc.abstractmethod
    def get_tensor(self, key: str) -> torch.Tensor:
        """A view of the file, of bytes if `Entry.dtype` is one of GGUF_BLOCKS. Writing to it would end the process.

        ValueError for a file that has been cut since its header was read, and for a dtype that torch does not have."""

    def objects(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Name -> what its small tensor of JSON bytes says. ValueError for a tensor that has none."""
        with _read(self.path):
            for name, entry in entries.items():
                if entry.dtype != "U8" or len(entry.shape) != 1 or entry.shape[0] > MAX_JSON_BYTES:
                    raise ValueError(f"its entry for {short(name)} is {entry.dtype} of the shape {short(list(entry.shape))}")
            return {name: json.loads(bytes(self.get_tensor(entry.key).tolist())) for name, entry in entries.items()}

    def stated(self, text: str, inside: str) -> dict[str, Any]:
        """Object `inside` of the JSON object in one of `texts`. Empty if either is missing. ValueError for another form."""
        with _read(self.path):
            outer = json.loads(self.texts.get(text, "{}"))
            inner = outer.get(inside, {}) if isinstance(outer, dict) else None
            if not isinstance(inner, dict):
                raise ValueError(f"its header says {text} in an unknown form")
            return inner

    def _bytes(self, start: int, count: int) -> torch.Tensor:
        """[count] uint8, a view of the map from byte `start` on."""
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


class SafetensorsFile(MappedFile):
    """The safetensors package checks the file. Its own tensors for torch would count as the process's memory."""

    def __init__(self, path: Path):
        super().__init__(path)
        with _read(path), path.open("rb") as file:
            if len(first := file.read(_LENGTH.size)) < _LENGTH.size:
                raise ValueError("it ends before its header")
            (length,) = _LENGTH.unpack(first)
            if length > MAX_HEADER_BYTES:
                raise ValueError(
                    f"its header is said to have {length:,} bytes, and no model's has more than {MAX_HEADER_BYTES:,}"
                )
            # Opening checks that every tensor lies within the file and has as many bytes as its shape needs.
            with safe_open(path, framework="np") as checked:
                if len(keys := checked.keys()) > MAX_TENSORS:
                    raise ValueError(f"it says that it has {len(keys)} tensors")
            header = json.loads(file.read(length))
        self.texts = header.get("__metadata__") or {}
        self._start, self._stored = _LENGTH.size + length, {key: header[key] for key in keys}
        self.entries = {
            key: Entry(key, tuple(each["shape"]), NAMES.get(each["dtype"], each["dtype"]))
            for key, each in self._stored.items()
        }

    def get_tensor(self, key: str) -> torch.Tensor:
        stored = self._stored[key]
        if stored["dtype"] not in DTYPES:
            raise ValueError(f"{short(key)} is stored as {short(stored['dtype'], 20)}")
        dtype, (start, stop) = DTYPES[stored["dtype"]], stored["data_offsets"]
        if start == stop:
            return torch.empty(stored["shape"], dtype=dtype)
        return self._bytes(self._start + start, stop - start).view(dtype).view(stored["shape"])


class GgufFile(MappedFile):
    """Needs the `gguf` package. A tensor of blocks is [rows, bytes] uint8. If a row is not a whole number of blocks,
    the tensor is expanded to float32."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise ValueError(
                f"model_name: {short(path.name)} is a GGUF file. Reading it needs the Python package 'gguf': pip install "
                "gguf"
            ) from error
        with _read(path):
            with path.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                header = read_gguf_header(memoryview(file.read(MAX_GGUF_HEADER_BYTES)))
            self._kinds = {name: GGMLQuantizationType(tensor.kind) for name, tensor in header.tensors.items()}
            self._places = {}
            for name, tensor in header.tensors.items():
                values, size = GGML_QUANT_SIZES[self._kinds[name]]
                count = math.prod(tensor.shape)
                nbytes = count // values * size
                if (tensor.shape or (1,))[-1] % values or tensor.start + nbytes > length:
                    raise ValueError(f"{short(name)} is not all there")
                self._places[name] = tensor.start, nbytes
        self.texts = header.texts
        self.entries = {}
        for name, tensor in header.tensors.items():
            shape = header.arrays.get(ORIGINAL_SHAPE + name) or tensor.shape
            if min(shape, default=1) < 1 or math.prod(shape) != math.prod(tensor.shape):
                raise ValueError(
                    f"model_name: {short(path.name)} has {short(name)} in a shape that does not match its number of values."
                )
            self.entries[name] = Entry(name, shape, self._dtype(name, shape))

    def get_tensor(self, key: str) -> torch.Tensor:
        kind, entry, stored = self._kinds[key].name, self.entries[key], self._bytes(*self._places[key])
        if kind in NAMES:
            return stored.view(DTYPES[kind]).view(entry.shape)
        if entry.dtype == kind:
            return stored.view(entry.shape[0], -1)
        return GgufBlocks(kind).expand(stored.view(1, -1), torch.float32).view(entry.shape)

    def _dtype(self, key: str, shape: tuple[int, ...]) -> str:
        """Entry.dtype."""
        kind = self._kinds[key].name
        if kind not in GGUF_BLOCKS:
            return NAMES.get(kind, kind)
        return kind if len(shape) > 1 and math.prod(shape[1:]) % GGUF_BLOCKS[kind][0] == 0 else "fp32"


def open_file(path: Path) -> MappedFile:
    """The file, whose header is read. ValueError, naming the file, if it is damaged or incomplete."""
    return GgufFile(path) if path.suffix.lower() in GGUF else SafetensorsFile(path)


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
