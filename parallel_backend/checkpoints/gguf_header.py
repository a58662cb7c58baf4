"""Reads the header of a GGUF file: its tensors and their offsets. Checks every count and length before using it.

The reader of the package `gguf` creates an array for every element of every field, and trusts all counts. A small file can
make it run for hours. The format is described in ggml's docs/gguf.md; versions 2 and 3 are read.
"""

import math
import struct
from typing import NamedTuple

from parallel_backend.core.short_text import short

Shape = tuple[int, ...]

MAGIC, VERSIONS = 0x46554747, (2, 3)
ALIGNMENT = "general.alignment"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The type number of a field's value -> its format letter in `struct`."""
STRING, ARRAY = 8, 9
MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1 << 16
MAX_FIELDS = 1 << 14
MAX_NAME = 1 << 12
MAX_AXES = 8
MAX_KEPT = 64
"""Maximum number of elements of an array that is stored. Shapes are short, and vocabularies are not needed."""


class StoredTensor(NamedTuple):
    """Where a tensor is in the file, and its type and shape."""

    kind: int
    """The number of its GGML type."""
    shape: Shape
    """Its shape, slowest axis first."""
    start: int
    """The offset of its bytes in the file."""


class GgufHeader(NamedTuple):
    """The tensors and fields of a header, by name."""

    tensors: dict[str, StoredTensor]
    arrays: dict[str, Shape]
    """The fields that are arrays of at most MAX_KEPT integers."""
    texts: dict[str, str]
    """The fields that are text. ComfyUI-GGUF uses them like the metadata of a safetensors header."""


class _Cursor:
    """Reads forward through the beginning of a file."""

    def __init__(self, content: memoryview):
        self._content, self.at = content, 0

    def read(self, size: int) -> memoryview:
        if size > len(self._content) - self.at:
            raise ValueError("its header ends too soon, or is too long")
        self.at += size
        return self._content[self.at - size : self.at]

    def numbers(self, letters: str) -> tuple:
        return struct.unpack(f"<{letters}", self.read(struct.calcsize(f"<{letters}")))

    def number(self, letter: str) -> int:
        return self.numbers(letter)[0]

    def name(self) -> str:
        length = self.number("Q")
        if length > MAX_NAME:
            raise ValueError(f"a name in its header has {length} bytes")
        return bytes(self.read(length)).decode()

    def text(self) -> str:
        return bytes(self.read(self.number("Q"))).decode(errors="replace")

    def skip(self, kind: int, count: int) -> None:
        """Skip `count` values of the type number `kind`."""
        if kind in SCALARS:
            self.read(count * struct.calcsize(f"<{SCALARS[kind]}"))
        elif kind == STRING:
            self._skip_texts(count)
        else:
            raise ValueError(f"a field in its header has the unknown type {kind}")

    def _skip_texts(self, count: int) -> None:
        """Skip `count` strings in one loop: a vocabulary has hundreds of thousands, a malicious header millions."""
        end, length_at = len(self._content), struct.Struct("<Q").unpack_from
        if count > (end - self.at) // 8:
            raise ValueError(f"a list in its header claims to have {count} strings")
        after = self.at
        for _ in range(count):
            if after + 8 > end:
                raise ValueError("a list of strings in its header ends too soon")
            after += 8 + length_at(self._content, after)[0]
        self.read(after - self.at)


def read_gguf_header(content: memoryview) -> GgufHeader:
    """Return the header in `content`, which is a file's first MAX_HEADER_BYTES. Raises ValueError if it is damaged, or has
    larger counts or lengths than any model."""
    cursor = _Cursor(content)
    magic, version, tensors, fields = cursor.numbers("IIQQ")
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError("it is not a GGUF file, or has another version or byte order")
    if tensors > MAX_TENSORS or fields > MAX_FIELDS:
        raise ValueError(f"{tensors} tensors and {fields} fields are more than any model has")
    alignment, arrays, texts = _fields(cursor, fields)
    described: dict[str, tuple[int, Shape, int]] = {}  # name -> type, shape, offset from the header's end
    for _ in range(tensors):
        name, axes = cursor.name(), cursor.number("I")
        if axes > MAX_AXES or name in described:
            raise ValueError(f"{short(name)} comes twice or has {axes} axes")
        shape = cursor.numbers("Q" * axes)[::-1]
        kind, offset = cursor.number("I"), cursor.number("Q")
        if math.prod(shape) == 0 or offset % alignment:
            raise ValueError(f"{short(name)} has no values, or is at no multiple of {alignment} bytes")
        described[name] = kind, shape, offset
    start = -(-cursor.at // alignment) * alignment
    tensors_at = {name: StoredTensor(kind, shape, start + at) for name, (kind, shape, at) in described.items()}
    return GgufHeader(tensors_at, arrays, texts)


def _fields(cursor: _Cursor, count: int) -> tuple[int, dict[str, Shape], dict[str, str]]:
    """Read `count` fields. Returns the alignment of the tensors, short arrays by name, and text by name."""
    alignment, names = 32, set()
    arrays: dict[str, Shape] = {}
    texts: dict[str, str] = {}
    for _ in range(count):
        name, kind = cursor.name(), cursor.number("I")
        if name in names:
            raise ValueError(f"the field {short(name)} comes twice")
        names.add(name)
        if name == ALIGNMENT:
            if SCALARS.get(kind) != "I":
                raise ValueError(f"its alignment has the type {kind}")
            alignment = cursor.number("I")
            if alignment < 8 or alignment & (alignment - 1):
                raise ValueError(f"its alignment is {alignment}")
        elif kind == ARRAY:
            kind, length = cursor.numbers("IQ")
            if SCALARS.get(kind) in tuple("BbHhIiQq") and length <= MAX_KEPT:
                arrays[name] = cursor.numbers(SCALARS[kind] * length)
            else:
                cursor.skip(kind, length)
        elif kind == STRING:
            texts[name] = cursor.text()
        else:
            cursor.skip(kind, 1)
    return alignment, arrays, texts
