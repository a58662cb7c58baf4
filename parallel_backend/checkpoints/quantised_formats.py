"""ComfyUI's quantised formats of a linear layer's weight: what a file has beside the values, and what both are together.

As comfy/quant_ops.py (`QUANT_ALGOS`) and comfy/ops.py (`_load_quantized_module`) have them; the layouts are comfy-kitchen's.
fp8 is here as far as its file goes, and is expanded in packed_formats.py. A weight is [rows, columns], output by input.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from parallel_backend.core.spans import Span

from .packed_formats import CHUNK_VALUES


class ScalePlace(Enum):
    """Which values of the weight an element of a tensor beside it is for."""

    WHOLE = "all"
    ROW = "a row's"
    ROW_OR_WHOLE = "a row's, or all"
    COLUMN = "a column's"
    BLOCK = "some neighbouring ones of a row"
    TILED = "as BLOCK, in the order in which tensor cores read them (`untiled`)"


@dataclass(frozen=True)
class ScaleLayout:
    """A tensor `<layer>.<name>` beside the weight."""

    place: ScalePlace
    dtypes: tuple[str, ...]
    needed: bool = True


FLOATS = ("fp32", "bf16", "fp16")
TILE = 128, 4
"""Rows and columns of scales in a tile."""


@dataclass(frozen=True)
class Format:
    """What a file has of a layer in this format. `stored`: its values' dtype in the file."""

    stored: str
    scales: Mapping[str, ScaleLayout]
    block: int = 1
    """Neighbouring values of a row that have a scale in common; 0 where the layer says it (`group_size`)."""
    per_byte: int = 1
    rotated: bool = False
    """Groups of a row's values are rotated (ConvRot); the layer says how large they are (`convrot_groupsize`)."""


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
        per_byte=2,
    ),
    "mxfp8": Format(
        "fp8_e4m3fn",
        {
            "weight_scale": ScaleLayout(ScalePlace.TILED, ("F8_E8M0", "U8")),
            "input_scale": ScaleLayout(ScalePlace.WHOLE, FLOATS, False),
        },
        block=32,
    ),
    "convrot_w4a4": Format("I8", {"weight_scale": ScaleLayout(ScalePlace.ROW, FLOATS)}, block=64, per_byte=2, rotated=True),
    "asym_w4a8_int8": Format(
        "I8",
        {
            "weight_s_rel": ScaleLayout(ScalePlace.BLOCK, ("fp8_e4m3fn", "U8", "fp32")),
            "weight_s_channel": ScaleLayout(ScalePlace.ROW, FLOATS),
            "weight_codebook": ScaleLayout(ScalePlace.WHOLE, FLOATS, False),
        },
        block=0,
        per_byte=2,
        rotated=True,
    ),
}
"""By the name that files give."""

KEPT = frozenset(FORMATS) - {"float8_e4m3fn", "float8_e5m2"}
"""Names of the formats that a rank keeps as `Quantised`."""

ROTATIONS = 4, 16, 64, 256, 1024
"""Sizes of a rotated group: powers of four."""
CODES = 16
"""Values that four bits stand for: of a codebook."""


@dataclass(frozen=True)
class Layer:
    """How a layer of a file is quantised, by what the file says of it."""

    format: str
    rotation: int = 0
    """Values of a row that are rotated together. 0: none."""
    block: int = 1
    """Neighbouring values of a row that have a scale in common."""
    full_precision: bool = False
    """The layer's input is to stay as it is, and the weight to be expanded."""
    linear_dtype: str = "int4"
    """Of convrot_w4a4: what a rotated input is rounded to, int4 or int8."""

    @property
    def per_byte(self) -> int:
        return FORMATS[self.format].per_byte

    @property
    def unit(self) -> int:
        """Columns come in such groups. They can be cut between two of them."""
        return math.lcm(self.rotation or 1, self.block, self.per_byte)


@dataclass(frozen=True)
class Quantised:
    """A weight, or a rank's part of one, in one of KEPT. `scales`: by name, on the weight's device.

    Scales of rows are float32 [rows, 1], one for all float32 [1, 1], those of columns float32 [columns], of blocks
    [rows, columns / block], tiles as in the file. A Packing (packed_formats.py).
    """

    layer: Layer
    scales: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.scales.values())

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.scales

    def on(self, tensors: Mapping[str, torch.Tensor]) -> "Quantised":
        return replace(self, scales=tensors)

    def byte_span(self, columns: Span) -> Span | None:
        """The bytes of a row that hold these columns; None where they cut a group of them apart."""
        if columns.start % self.layer.unit or columns.stop % self.layer.unit:
            return None
        return Span(columns.start // self.layer.per_byte, columns.stop // self.layer.per_byte)

    def columns(self, row_bytes: int) -> int:
        return row_bytes * self.layer.per_byte

    def expand(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, n] uint8 -> new [rows, columns] in `dtype`: the format's arithmetic in float32, rounded once."""
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
                if number == 0 and self.layer.format == "asym_w4a8_int8":
                    values = values.round_().clamp_(-127, 127)
            if self.layer.rotation:
                values = rotate(values, self.layer.rotation)
            out[part] = values * self.scales["pre_quant_scale"] if "pre_quant_scale" in self.scales else values
        return out

    def _codes(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, n] uint8 -> float32 [rows, columns]: the values before any scale."""
        match self.layer.format:
            case "int8_tensorwise":
                return packed.view(torch.int8).float()
            case "mxfp8":
                return packed.view(torch.float8_e4m3fn).float()
            case "nvfp4":  # the first of two values in the high bits
                return _fp4_table(packed.device)[torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1).int()]
            case "convrot_w4a4":  # signed
                codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
                return ((codes ^ 8).float()) - 8
            case "asym_w4a8_int8":
                codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
                codebook = self.scales.get("weight_codebook")
                return codes.float() - 8 if codebook is None else codebook.view(-1)[codes.int()]
        raise AssertionError(self.layer.format)

    def _scale_factors(self, rows: int, columns: int) -> list[torch.Tensor]:
        """float32 [rows or 1, n] each: the values are to be multiplied with one after the other. n divides the columns."""
        match self.layer.format:
            case "nvfp4":
                blocks = untiled(self.scales["weight_scale"].view(torch.float8_e4m3fn), rows, columns // self.layer.block)
                return [self.scales["weight_scale_2"] * blocks.float()]
            case "mxfp8":
                exponents = untiled(self.scales["weight_scale"].view(torch.uint8), rows, columns // self.layer.block)
                return [torch.where(exponents == 0, 0.0, torch.exp2(exponents.float() - 127))]
            case "asym_w4a8_int8":
                return [self.scales["weight_s_rel"].float(), self.scales["weight_s_channel"]]
        return [self.scales["weight_scale"]]


@functools.cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """float32 [size, size]: ConvRot's rotation, symmetric and its own inverse. `size`: one of ROTATIONS."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float32, device=device)
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix / size**0.5


def rotate(values: torch.Tensor, size: int) -> torch.Tensor:
    """float32 [rows, columns] with each `size` neighbours of a row rotated; twice gives the values again."""
    return (values.view(len(values), -1, size) @ hadamard(size, values.device)).view(values.shape)


@functools.cache
def _fp4_table(device: torch.device) -> torch.Tensor:
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return torch.tensor([*positive, *(-value for value in positive)], device=device)


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Of [rows, columns] scales in whole tiles."""
    return -(-rows // TILE[0]) * TILE[0], -(-columns // TILE[1]) * TILE[1]


def untiled(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales in tiles -> [rows, columns].

    A tile of 128 x 4 holds the four scales of row r, then of r + 32, r + 64, r + 96, then those of row r + 1: cuBLAS'
    layout of block scaling factors (docs.nvidia.com/cuda/cublas).
    """
    height, width = tiled_shape(rows, columns)
    parts = tiles.view(torch.uint8).reshape(height // 128, width // 4, 32, 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(height, width)[:rows, :columns].contiguous().view(tiles.dtype)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] scales -> `tiled_shape`, with zeros at the ends: the inverse of `untiled`."""
    height, width = tiled_shape(*scales.shape)
    padded = torch.zeros(height, width, dtype=torch.uint8, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    parts = padded.view(height // 128, 4, 32, width // 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(height, width).view(scales.dtype)


def int8_layer(columns: int) -> Layer:
    """Of a weight that is quantised here: rotated in the largest groups of 256, 64 or 16 columns that make up `columns`."""
    return Layer("int8_tensorwise", next((size for size in (256, 64, 16) if columns % size == 0), 0))


def blank(layer: Layer, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, Quantised]:
    """A weight of zeros, whose product costs what any other costs: [rows, n] uint8, and what is beside it."""
    blocks = rows, columns // layer.block
    shapes = {
        ScalePlace.WHOLE: (1, 1),
        ScalePlace.ROW: (rows, 1),
        ScalePlace.ROW_OR_WHOLE: (rows, 1),
        ScalePlace.BLOCK: blocks,
        ScalePlace.TILED: tiled_shape(*blocks),
    }
    scales = {}
    for leaf, known in FORMATS[layer.format].scales.items():
        if known.needed:
            single = known.place in (ScalePlace.BLOCK, ScalePlace.TILED)
            dtype = torch.float8_e4m3fn if known.place is ScalePlace.BLOCK else torch.uint8 if single else torch.float32
            scales[leaf] = torch.ones(shapes[known.place], device=device).to(dtype)
    packed = torch.zeros(rows, columns // layer.per_byte, dtype=torch.uint8, device=device)
    return packed, Quantised(layer, scales)


def quantise_int8(values: torch.Tensor) -> tuple[torch.Tensor, Quantised]:
    """A weight [rows, columns] -> int8_tensorwise with a scale by row: [rows, columns] uint8, and what expands it."""
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


def quantised_bytes(kind: str, shape: tuple[int, ...], whole: tuple[int, ...], scales: Mapping[str, tuple[int, ...]]) -> int:
    """Of a weight of `shape` in one of KEPT, which is some rows of one of shape `whole`, with what is beside it.

    `scales`: shapes in the file; without any the weight is made by `quantise_int8`.
    """
    size = math.prod(shape) // FORMATS[kind].per_byte
    for leaf, expected in FORMATS[kind].scales.items():
        if leaf in scales or (not scales and expected.needed):
            single = expected.place in (ScalePlace.BLOCK, ScalePlace.TILED)
            values = math.prod(scales.get(leaf, (shape[0], 1)))
            size += (1 if single else 4) * (values if values == 1 else values * shape[0] // whole[0])
    return size


def cut_scale(
    tensor: torch.Tensor, place: ScalePlace, layer: Layer, size: tuple[int, int], rows: list[Span], columns: list[Span]
) -> torch.Tensor:
    """The part of a tensor beside a weight of `size` (rows, columns) that belongs to these rows and columns of it.

    In the form that Quantised has; the columns are whole groups (`Layer.unit`).
    """
    match place:
        case ScalePlace.WHOLE:
            return tensor.float().view(1, -1)
        case ScalePlace.ROW | ScalePlace.ROW_OR_WHOLE:
            scales = tensor.float().view(-1, 1)
            return joined([scales[span.slice] for span in rows]) if len(scales) == size[0] else scales
        case ScalePlace.COLUMN:
            return torch.cat([tensor.float().view(-1)[span.slice] for span in columns])
    if place is ScalePlace.TILED and (whole := _whole_tiles(size, rows, columns)) is not None:
        return joined([tensor.view(torch.uint8)[part] for part in whole])
    blocks = untiled(tensor, size[0], size[1] // layer.block) if place is ScalePlace.TILED else tensor
    single = blocks.element_size() == 1  # bytes by another name can be cut and joined on every device
    values = torch.cat([(blocks.view(torch.uint8) if single else blocks)[span.slice] for span in rows])
    inside = [slice(span.start // layer.block, span.stop // layer.block) for span in columns]
    values = torch.cat([values[:, part] for part in inside], dim=1)
    if place is ScalePlace.TILED:
        return tiled(values)
    return values.view(torch.float8_e4m3fn) if single else values


def _whole_tiles(size: tuple[int, int], rows: list[Span], columns: list[Span]) -> list[slice] | None:
    """Rows of tiles, which lie together, where they are all that these rows need. None: tiles have to be taken apart."""
    edges = [edge for span in rows for edge in (span.start, span.stop)]
    inner = edges[:-1] if edges[-1] == size[0] else edges  # only what comes last may end within a tile
    if columns != [Span(0, size[1])] or any(edge % TILE[0] for edge in inner):
        return None
    return [slice(span.start, tiled_shape(span.stop, 1)[0]) for span in rows]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts one below the other: a single one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
