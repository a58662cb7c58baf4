"""Packed weight formats: 8-bit floats with or without a scale, 16-bit floats, and GGUF's blocks. Packed weights are expanded
before computing with them. ComfyUI's other quantized formats are in quantised_formats.py."""

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from parallel_backend.core.spans import Span


class Packing(abc.ABC):
    """The format of a weight [rows, columns] that is stored as [rows, n] uint8. It can be cut between any two rows."""

    @property
    def nbytes(self) -> int:
        """The bytes that `tensors` take."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that belong to the uint8 values, such as scales, by name."""
        return {}

    def on(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return a copy of this packing with `tensors` in place of its own, by the same names."""
        return self

    @property
    @abc.abstractmethod
    def group(self) -> tuple[int, int]:
        """The number of values and of bytes of a group. A row has a whole number of groups, and can be cut between them."""

    def byte_span(self, columns: Span) -> Span | None:
        """Return which bytes of a row store these columns, or None if the columns are not a whole number of groups."""
        values, size = self.group
        if columns.start % values or columns.stop % values:
            return None
        return Span(columns.start // values * size, columns.stop // values * size)

    def columns(self, row_bytes: int) -> int:
        """Return the number of values in `row_bytes` bytes of a row."""
        values, size = self.group
        return row_bytes * values // size

    @abc.abstractmethod
    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Expand [rows, n] uint8 to a new tensor [rows, columns] in `dtype` on the same device. Rounds once, at the end."""


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

TILE = 128, 4
"""Rows and columns of the scales that nvfp4 and mxfp8 files have in a tile, in the order in which tensor cores read them:
cuBLAS' layout of block scaling factors (docs.nvidia.com/cuda/cublas)."""
CHUNK_VALUES = 1 << 22
"""The number of values that are expanded at once. The arithmetic in float32 makes several copies of them."""


@dataclass(frozen=True)
class Fp8(Packing):
    """The packing of 8-bit floats."""

    kind: str
    """The kind of fp8, a key of FP8_KINDS."""
    scale: torch.Tensor | None = None
    """float32 [1, 1], or [rows, 1] with one scale per row, on the weight's device. None: the values are not scaled."""
    input_scale: torch.Tensor | None = None
    """float32 [1, 1]: the layer's input is divided by it before the input is rounded to fp8. None: if there is a `scale`,
    the input is not divided; else its largest value is mapped to fp8's largest."""
    full_precision: bool = False
    """Whether the layer multiplies the expanded weight with its input in full precision."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        scales = {"scale": self.scale, "input_scale": self.input_scale}
        return {name: tensor for name, tensor in scales.items() if tensor is not None}

    def on(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        return replace(self, scale=tensors.get("scale"), input_scale=tensors.get("input_scale"))

    @property
    def group(self) -> tuple[int, int]:
        return 1, 1

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values = packed.view(FP8_KINDS[self.kind]).to(dtype)
        return values if self.scale is None else torch.mul(values, self.scale, out=values)


@dataclass(frozen=True)
class Half(Packing):
    """The packing of 16-bit floats, for devices that do not compute in them."""

    kind: str
    """The kind of float, a key of HALF_KINDS."""

    @property
    def group(self) -> tuple[int, int]:
        return 1, 2

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return packed.view(HALF_KINDS[self.kind]).to(dtype)


@dataclass(frozen=True)
class GgufBlocks(Packing):
    """The packing in GGUF's block formats. Every row has a whole number of blocks."""

    kind: str
    """The GGUF type, a key of GGUF_BLOCKS."""

    @property
    def group(self) -> tuple[int, int]:
        return GGUF_BLOCKS[self.kind]

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values, size = self.group
        out = torch.empty(packed.shape[0], self.columns(packed.shape[1]), dtype=dtype, device=packed.device)
        places = out.view(-1, values).split(CHUNK_VALUES // values)
        for place, blocks in zip(places, packed.view(-1, size).split(CHUNK_VALUES // values), strict=True):
            place.copy_(_expand_blocks(self.kind)(blocks, values, size, torch.float32))
        return out


@functools.cache
def _expand_blocks(kind: str) -> Callable[[torch.Tensor, int, int, torch.dtype], torch.Tensor]:
    """Return diffusers' function that expands one type, as ComfyUI-GGUF does: blocks [n, bytes] uint8 -> [n, values]."""
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return dequantize_functions[gguf.GGMLQuantizationType[kind]]


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of [rows, columns] scales, padded to a whole number of tiles."""
    return -(-rows // TILE[0]) * TILE[0], -(-columns // TILE[1]) * TILE[1]
