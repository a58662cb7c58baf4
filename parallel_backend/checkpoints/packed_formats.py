"""Packed weight formats: 8-bit floats with or without a scale, 16-bit floats, and GGUF's blocks. Packed weights are expanded
to compute. ComfyUI's other quantised formats are in quantised_formats.py.

A packed weight [rows, bytes] uint8 can be cut between any rows, and between columns where `byte_span` allows it.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch

from parallel_backend.core.spans import Span


class Packing(Protocol):
    """The format of a weight [rows, columns] kept as [rows, n] uint8."""

    @property
    def nbytes(self) -> int:
        """Of what is kept beside those bytes."""
        ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What is kept beside those bytes, by name."""
        ...

    def on(self, tensors: Mapping[str, torch.Tensor]) -> "Packing":
        """The same with other `tensors` of these names."""
        ...

    def byte_span(self, columns: Span) -> Span | None:
        """The bytes of a row that hold these columns; None where they are not whole groups of values."""
        ...

    def columns(self, row_bytes: int) -> int:
        """Values in `row_bytes` bytes of a row."""
        ...

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, n] uint8 -> new [rows, columns] in `dtype`, on the same device."""
        ...


FP8_KINDS = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

HALF_KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}

GGUF_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_XS": (256, 136),
}
"""GGUF types that can be expanded -> (values per block, bytes per block)."""

CHUNK_VALUES = 1 << 22
"""Values that are expanded at once. The arithmetic in float32 makes several copies of them."""


@dataclass(frozen=True)
class Fp8:
    """8-bit floats."""

    kind: str
    """Key of FP8_KINDS."""
    scale: torch.Tensor | None = None
    """float32 [1, 1], or [rows, 1] for each row, on the weight's device. None: not scaled."""
    input_scale: torch.Tensor | None = None
    """float32 [1, 1]: the layer's input is divided by it before it is rounded to fp8. None: by one if there is a `scale`,
    or else by what its largest value makes the largest of fp8."""
    full_precision: bool = False
    """The layer's input is to stay as it is, and the weight to be expanded."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        scales = {"scale": self.scale, "input_scale": self.input_scale}
        return {name: tensor for name, tensor in scales.items() if tensor is not None}

    def on(self, tensors: Mapping[str, torch.Tensor]) -> "Fp8":
        return replace(self, **tensors)

    def byte_span(self, columns: Span) -> Span:
        return columns

    def columns(self, row_bytes: int) -> int:
        return row_bytes

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns] uint8 -> [rows, columns] in `dtype`. The product with the scale is rounded once."""
        values = packed.view(FP8_KINDS[self.kind]).to(dtype)
        return values if self.scale is None else torch.mul(values, self.scale, out=values)


class _BytesAlone:
    """A Packing that keeps nothing beside its bytes."""

    nbytes = 0
    tensors: ClassVar[Mapping[str, torch.Tensor]] = {}

    def on(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        return self


@dataclass(frozen=True)
class Half(_BytesAlone):
    """16-bit floats as they are, for devices that do not compute in them."""

    kind: str
    """Key of HALF_KINDS."""

    def byte_span(self, columns: Span) -> Span:
        return Span(2 * columns.start, 2 * columns.stop)

    def columns(self, row_bytes: int) -> int:
        return row_bytes // 2

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, n] uint8 -> [rows, n / 2] in `dtype`."""
        return packed.view(HALF_KINDS[self.kind]).to(dtype)


@dataclass(frozen=True)
class GgufBlocks(_BytesAlone):
    """GGUF's block formats. Every row is a whole number of blocks."""

    kind: str
    """Key of GGUF_BLOCKS."""

    def byte_span(self, columns: Span) -> Span | None:
        """Bytes of a row that hold these columns. None if the columns do not begin and end at a block's border."""
        values, size = GGUF_BLOCKS[self.kind]
        if columns.start % values or columns.stop % values:
            return None
        return Span(columns.start // values * size, columns.stop // values * size)

    def columns(self, row_bytes: int) -> int:
        values, size = GGUF_BLOCKS[self.kind]
        return row_bytes // size * values

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, n] uint8 -> [rows, columns] in `dtype`. The format's arithmetic is in float32, rounded once."""
        values, size = GGUF_BLOCKS[self.kind]
        out = torch.empty(packed.shape[0], self.columns(packed.shape[1]), dtype=dtype, device=packed.device)
        places = out.view(-1, values).split(CHUNK_VALUES // values)
        for place, blocks in zip(places, packed.view(-1, size).split(CHUNK_VALUES // values), strict=True):
            place.copy_(_expand_blocks(self.kind)(blocks, values, size, torch.float32))
        return out


@functools.cache
def _expand_blocks(kind: str) -> Callable[[torch.Tensor, int, int, torch.dtype], torch.Tensor]:
    """diffusers' function that expands one type, as in ComfyUI-GGUF: blocks [n, bytes] uint8 -> [n, values]."""
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return dequantize_functions[gguf.GGMLQuantizationType[kind]]
