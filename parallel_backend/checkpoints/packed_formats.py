"""Packed weight formats: 8-bit floats with or without a scale, 16-bit floats, and GGUF's blocks.

Packed weights are expanded to compute. ComfyUI's other quantised formats are in quantised_formats.py.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from parallel_backend.core.spans import Span


class Packing(abc.ABC):
    """The format of a weight [rows, columns] kept as [rows, n] uint8. It can be cut between any rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors kept with the uint8 values, such as scales, by name."""
        return {}

    def on(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """The same with other `tensors` of these names."""
        return self

    @property
    @abc.abstractmethod
    def group(self) -> tuple[int, int]:
        """(values, bytes) of a group. A row is whole groups, and can be cut between them."""

    def byte_span(self, columns: Span) -> Span | None:
        """The bytes of a row that hold these columns. None: they are not whole groups."""
        values, size = self.group
        if columns.start % values or columns.stop % values:
            return None
        return Span(columns.start // values * size, columns.stop // values * size)

    def columns(self, row_bytes: int) -> int:
        """Values in `row_bytes` bytes of a row."""
        values, size = self.group
        return row_bytes * values // size

    @abc.abstractmethod
    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, n] uint8 -> new [rows, columns] in `dtype`, on the same device. Values are rounded once, at the end."""


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
"""Values that are expanded at once. The arithmetic in float32 makes several copies of them."""


@dataclass(frozen=True)
class Fp8(Packing):
    """8-bit floats."""

    kind: str
    """Key of FP8_KINDS."""
    scale: torch.Tensor | None = None
    """float32 [1, 1], or [rows, 1] for each row, on the weight's device. None: not scaled."""
    input_scale: torch.Tensor | None = None
    """float32 [1, 1]: the layer's input is divided by it before the input is rounded to fp8. None: the divisor is one if
    there is a `scale`, or else maps the input's largest value to fp8's largest."""
    full_precision: bool = False
    """The layer multiplies the expanded weight with its input in full precision."""

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
    """16-bit floats, for devices that do not compute in them."""

    kind: str
    """Key of HALF_KINDS."""

    @property
    def group(self) -> tuple[int, int]:
        return 1, 2

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return packed.view(HALF_KINDS[self.kind]).to(dtype)


@dataclass(frozen=True)
class GgufBlocks(Packing):
    """GGUF's block formats. Every row is a whole number of blocks."""

    kind: str
    """Key of GGUF_BLOCKS."""

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
    """diffusers' function that expands one type, as in ComfyUI-GGUF: blocks [n, bytes] uint8 -> [n, values]."""
    import gguf
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return dequantize_functions[gguf.GGMLQuantizationType[kind]]


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of [rows, columns] scales, padded to whole tiles."""
    return -(-rows // TILE[0]) * TILE[0], -(-columns // TILE[1]) * TILE[1]
