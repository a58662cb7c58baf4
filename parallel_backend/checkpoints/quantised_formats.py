"""ComfyUI's quantized formats of a linear layer's weight: the layout of their scales, and the arithmetic that expands them.

They follow comfy/quant_ops.py (`QUANT_ALGOS`) and comfy/ops.py (`_load_quantized_module`); the layouts are comfy-kitchen's.
fp8's scales are here too, but its weights are expanded in packed_formats.py. A weight is [rows, columns]: output by input.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self

import torch

from parallel_backend.core.spans import Span

from .packed_formats import CHUNK_VALUES, TILE, Packing, tiled, tiled_shape, untiled


class ScalePlace(Enum):
    """The values of the weight that share one scale."""

    WHOLE = "all"
    ROW = "a row's"
    ROW_OR_WHOLE = "a row's, or all"
    COLUMN = "a column's"
    BLOCK = "some neighbouring ones of a row"
    GROUP = "as BLOCK, stored as [blocks of a row, rows]"
    TILED = "as BLOCK, in the order in which tensor cores read them (`untiled`)"


@dataclass(frozen=True)
class ScaleLayout:
    """The layout of a tensor `<layer>.<name>` with a weight's scales."""

    place: ScalePlace
    dtypes: tuple[str, ...]
    needed: bool = True

    @property
    def in_bytes(self) -> bool:
        """Whether a rank stores each scale in one byte instead of float32."""
        return self.place in (ScalePlace.BLOCK, ScalePlace.TILED)

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of one scale on a rank. `dtype`: the scale's dtype in the file."""
        if self.in_bytes:
            return 1
        return 2 if self.place is ScalePlace.GROUP and dtype != "fp32" else 4


FLOATS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Format:
    """Which tensors a layer has in a file of this format. `stored`: the weight's dtype in the file."""

    stored: str
    scales: Mapping[str, ScaleLayout]
    block: int = 1
    """The number of neighbouring values of a row that share a scale; 0 if the layer's settings state it (`group_size`)."""
    usual_block: int = 0
    """The value of `block` for a layer whose settings do not state it."""
    bits: int = 8
    """The number of bits of a value."""
    rotated: bool = False
    """Whether groups of a row's values are rotated (ConvRot). The layer's settings state their size
    (`convrot_groupsize`)."""


_FP8_SCALES = {
    "weight_scale": ScaleLayout(ScalePlace.ROW_OR_WHOLE, FLOATS),
    "input_scale": ScaleLayout(ScalePlace.WHOLE, FLOATS, False),
}

FORMATS = {
    "float8_e4m3fn": Format("fp8_e4m3fn", _FP8_SCALES),
    "float8_e5m2": Format("fp8_e5m2", _FP8_SCALES),
    "int8_tensorwise": Format("I8", {"weight_scale": ScaleLayout(ScalePlace.ROW_OR_WHOLE, FLOATS)}, rotated=True),
    "nvfp4": Format(
        "U8",
        {
            "weight_scale": ScaleLayout(ScalePlace.TILED, ("fp8_e4m3fn", "U8")),
            "weight_scale_2": ScaleLayout(ScalePlace.WHOLE, FLOATS),
            "input_scale": ScaleLayout(ScalePlace.WHOLE, FLOATS, False),
            "pre_quant_scale": ScaleLayout(ScalePlace.COLUMN, FLOATS, False),
        },
        block=16,
        bits=4,
    ),
    "mxfp8": Format(
        "fp8_e4m3fn",
        {
            "weight_scale": ScaleLayout(ScalePlace.TILED, ("F8_E8M0", "U8")),
            "input_scale": ScaleLayout(ScalePlace.WHOLE, FLOATS, False),
        },
        block=32,
    ),
    "convrot_w4a4": Format("I8", {"weight_scale": ScaleLayout(ScalePlace.ROW, FLOATS)}, block=64, bits=4, rotated=True),
    "asym_w4a8_int8": Format(
        "I8",
        {
            "weight_s_rel": ScaleLayout(ScalePlace.BLOCK, ("fp8_e4m3fn", "U8", "fp32")),
            "weight_s_channel": ScaleLayout(ScalePlace.ROW, FLOATS),
            "weight_codebook": ScaleLayout(ScalePlace.WHOLE, FLOATS, False),
        },
        block=0,
        usual_block=16,
        bits=4,
        rotated=True,
    ),
    "w6a8_int8": Format(
        "I8",
        {
            "weight_s_rel": ScaleLayout(ScalePlace.BLOCK, ("fp8_e4m3fn", "U8", "fp32")),
            "weight_s_channel": ScaleLayout(ScalePlace.ROW, FLOATS),
        },
        block=0,
        usual_block=16,
        bits=6,
        rotated=True,
    ),
    "awq_w4a16": Format(
        "I8",
        {"weight_scale": ScaleLayout(ScalePlace.GROUP, FLOATS), "weight_zeros": ScaleLayout(ScalePlace.GROUP, FLOATS)},
        block=0,
        usual_block=64,
        bits=4,
    ),
}
"""Name of the format in files -> the format."""

FP8_FORMATS = {name: FORMATS[name].stored for name in ("float8_e4m3fn", "float8_e5m2")}
"""ComfyUI's name of an fp8 format -> the storage format."""
KEPT = frozenset(FORMATS) - FP8_FORMATS.keys()
"""Names of the formats that a rank stores as `Quantised`."""

GROUPED_INT8 = "asym_w4a8_int8", "w6a8_int8"

ROTATIONS = 4, 16, 64, 256, 1024
"""Possible sizes of a rotated group: powers of four."""
CODES = 16
"""The number of values of a codebook. A code of four bits is an index into it."""


@dataclass(frozen=True)
class Layer:
    """How a layer of a file is quantized."""

    format: str
    rotation: int = 0
    """The number of values of a row that are rotated together. 0: values are not rotated."""
    block: int = 1
    """The number of neighbouring values of a row that share a scale."""
    full_precision: bool = False
    """Whether the layer multiplies the expanded weight with its input in full precision."""
    linear_dtype: str = "int4"
    """For convrot_w4a4: the dtype to which a rotated input is rounded, int4 or int8."""
    row: int = 0
    """For w6a8_int8: the number of columns. A row stores the low bits of all values before the high bits, so it is not
    cut."""

    @property
    def bits(self) -> int:
        return FORMATS[self.format].bits

    @property
    def unit(self) -> int:
        """The number of columns of a group. Columns can only be cut between two groups."""
        return math.lcm(self.rotation or 1, self.block, math.lcm(self.bits, 8) // self.bits, self.row or 1)


@dataclass(frozen=True)
class Quantised(Packing):
    """The packing of a weight, or of a rank's part of it, in a format of KEPT. `scales`: by name, on the weight's device.

    Scales are float32 [rows, 1] if by row, [1, 1] for all values, and [columns] if by column; by block they are [rows,
    columns / block] in one byte each. Scales of tiles and groups, and values added to groups, are as in the file.
    """

    layer: Layer
    scales: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.scales

    def on(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        return replace(self, scales=tensors)

    @property
    def group(self) -> tuple[int, int]:
        return self.layer.unit, self.layer.unit * self.layer.bits // 8

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = packed.shape[0], self.columns(packed.shape[1])
        out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
        scales = self._scale_factors(rows, columns)
        step = max(1, CHUNK_VALUES // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            values = self._codes(packed[part])
            for number, scale in enumerate(scales):
                scale = scale[part] if scale.shape[0] == rows else scale
                values = (values.view(len(values), scale.shape[1], -1) * scale[:, :, None]).view(len(values), columns)
                # comfy-kitchen multiplies these formats in int8, so the values before the row's scale are integers.
                if number == 0 and self.layer.format in GROUPED_INT8:
                    values = values.round_().clamp_(-127, 127)
            if "weight_zeros" in self.scales:
                added = self.scales["weight_zeros"].t()[part].float()
                values = (values.view(len(values), added.shape[1], -1) + added[:, :, None]).view(len(values), columns)
            if self.layer.rotation:
                values = rotate(values, self.layer.rotation)
            out[part] = values * self.scales["pre_quant_scale"] if "pre_quant_scale" in self.scales else values
        return out

    def _codes(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpack [rows, n] uint8 to float32 [rows, columns]: the values before any scale is applied."""
        match self.layer.format:
            case "int8_tensorwise":
                return packed.view(torch.int8).float()
            case "mxfp8":
                return packed.view(torch.float8_e4m3fn).float()
            case "nvfp4":  # the first of two values in the high bits
                return _fp4_table(packed.device)[torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1).int()]
            case "convrot_w4a4":  # signed
                return (_half_bytes(packed) ^ 8).float() - 8
            case "asym_w4a8_int8":
                codes = _half_bytes(packed)
                codebook = self.scales.get("weight_codebook")
                return codes.float() - 8 if codebook is None else codebook.view(-1)[codes.int()]
            case "w6a8_int8":
                return _six_bits(packed).float() - 32
            case "awq_w4a16":  # unsigned
                return _half_bytes(packed).float() - 8
        raise AssertionError(self.layer.format)

    def _scale_factors(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Return the factors of the values, to be applied in this order: float32 [rows or 1, n] each; n divides the
        columns."""
        match self.layer.format:
            case "nvfp4":
                blocks = untiled(self.scales["weight_scale"].view(torch.float8_e4m3fn), rows, columns // self.layer.block)
                return [self.scales["weight_scale_2"] * blocks.float()]
            case "mxfp8":
                exponents = untiled(self.scales["weight_scale"].view(torch.uint8), rows, columns // self.layer.block)
                return [torch.where(exponents == 0, 0.0, torch.exp2(exponents.float() - 127))]
            case "asym_w4a8_int8" | "w6a8_int8":
                return [self.scales["weight_s_rel"].float(), self.scales["weight_s_channel"]]
            case "awq_w4a16":
                return [self.scales["weight_scale"].t().float()]
        return [self.scales["weight_scale"]]


def _half_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [rows, n] to uint8 [rows, 2 n] from 0 to 15. The first of two values is in the low bits."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _six_bits(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [rows, n] to uint8 [rows, 4 n / 3] from 0 to 63. The low four bits of all values come before the high
    two."""
    low, high = packed.split([packed.shape[1] * 2 // 3, packed.shape[1] // 3], dim=1)
    return _half_bytes(low) | torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1) << 4


@functools.cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return ConvRot's rotation, float32 [size, size]: a symmetric matrix that is its own inverse. `size`: one of
    ROTATIONS."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float32, device=device)
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix / size**0.5


def rotate(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rotate each `size` neighbours of a row of float32 [rows, columns]. Rotating twice returns the original values."""
    return (values.view(len(values), -1, size) @ hadamard(size, values.device)).view(values.shape)


@functools.cache
def _fp4_table(device: torch.device) -> torch.Tensor:
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return torch.tensor([*positive, *(-value for value in positive)], device=device)


def int8_layer(columns: int) -> Layer:
    """Return the format for a weight that a rank quantizes, rotated in the largest groups of 256, 64 or 16 that divide
    `columns`."""
    return Layer("int8_tensorwise", next((size for size in (256, 64, 16) if columns % size == 0), 0))


def quantise_int8(values: torch.Tensor) -> tuple[torch.Tensor, Quantised]:
    """Quantize a weight [rows, columns] to int8_tensorwise with a scale per row. Returns [rows, columns] uint8 and its
    packing."""
    layer = int8_layer(values.shape[1])
    packed = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scale = torch.empty(len(values), 1, device=values.device)
    step = max(1, CHUNK_VALUES // values.shape[1])
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        whole = rotate(values[part].float(), layer.rotation) if layer.rotation else values[part].float()
        scale[part] = (whole.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
        packed[part] = (whole / scale[part]).round().to(torch.int8).view(torch.uint8)
    return packed, Quantised(layer, {"weight_scale": scale})


def quantised_bytes(
    kind: str, shape: tuple[int, ...], whole: tuple[int, ...], scales: Mapping[str, tuple[tuple[int, ...], str]]
) -> int:
    """Return the bytes on a rank of a weight of `shape` in a format of KEPT, with its scales. It has some or all of the
    file's rows.

    `whole`: shape of the file's weight. `scales`: shapes and dtypes in the file; empty for a weight from `quantise_int8`.
    """
    size = math.prod(shape) * FORMATS[kind].bits // 8
    for leaf, layout in FORMATS[kind].scales.items():
        if leaf in scales or (not scales and layout.needed):
            stored, dtype = scales.get(leaf, ((shape[0], 1), "fp32"))
            values = math.prod(stored)
            size += layout.nbytes(dtype) * (values if values == 1 else values * shape[0] // whole[0])
    return size


def cut_scale(
    tensor: torch.Tensor, place: ScalePlace, block: int, size: tuple[int, int], rows: list[Span], columns: list[Span]
) -> torch.Tensor:
    """Return the scales of these rows and columns, in Quantised's layout, from the scales of a weight of `size` (rows,
    columns). `block`: see Layer.block. The columns are whole groups (`Layer.unit`)."""
    match place:
        case ScalePlace.WHOLE:
            return tensor.float().view(1, -1)
        case ScalePlace.ROW | ScalePlace.ROW_OR_WHOLE:
            scales = tensor.float().view(-1, 1)
            return joined([scales[span.slice] for span in rows]) if len(scales) == size[0] else scales
        case ScalePlace.COLUMN:
            return torch.cat([tensor.float().view(-1)[span.slice] for span in columns])
        case ScalePlace.GROUP:
            groups = torch.cat([tensor[span.start // block : span.stop // block] for span in columns])
            return torch.cat([groups[:, span.slice] for span in rows], dim=1)
    if place is ScalePlace.TILED and (whole := _whole_tiles(size, rows, columns)) is not None:
        return joined([tensor.view(torch.uint8)[part] for part in whole])
    blocks = untiled(tensor, size[0], size[1] // block) if place is ScalePlace.TILED else tensor
    single = blocks.element_size() == 1  # some devices cannot cut and join float8, but all can as uint8
    values = torch.cat([(blocks.view(torch.uint8) if single else blocks)[span.slice] for span in rows])
    inside = [slice(span.start // block, span.stop // block) for span in columns]
    values = torch.cat([values[:, part] for part in inside], dim=1)
    if place is ScalePlace.TILED:
        return tiled(values)
    return values.view(torch.float8_e4m3fn) if single else values


def _whole_tiles(size: tuple[int, int], rows: list[Span], columns: list[Span]) -> list[slice] | None:
    """Return the tiles of these rows as slices, or None if tiles would have to be split."""
    edges = [edge for span in rows for edge in (span.start, span.stop)]
    inner = edges[:-1] if edges[-1] == size[0] else edges  # the weight's last row may end within a tile
    if columns != [Span(0, size[1])] or any(edge % TILE[0] for edge in inner):
        return None
    return [slice(span.start, tiled_shape(span.stop, 1)[0]) for span in rows]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the parts joined along the first dimension. A single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
