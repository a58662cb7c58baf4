"""ComfyUI's quantized formats of a linear layer's weight: the layout of their scales, and how a rank's part is cut.

As comfy/quant_ops.py (`QUANT_ALGOS`) and comfy/ops.py (`_load_quantized_module`) have them. comfy-kitchen, ComfyUI's kernel
library, expands them and multiplies with them. fp8's scales are here too, while its weights are expanded in
packed_formats.py. A weight is [rows, columns], output by input.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

import torch

from parallel_backend.core.kitchen import kitchen
from parallel_backend.core.spans import Span

from .packed_formats import TILE, Packing, tiled_shape


class ScalePlace(Enum):
    """The values of the weight that share one scale."""

    WHOLE = "all"
    ROW = "a row's"
    ROW_OR_WHOLE = "a row's, or all"
    COLUMN = "a column's"
    BLOCK = "some neighbouring ones of a row"
    GROUP = "as BLOCK, stored as [blocks of a row, rows]"
    TILED = "as BLOCK, in the order in which tensor cores read them (TILE)"


@dataclass(frozen=True)
class ScaleLayout:
    """The layout of a tensor `<layer>.<name>` with a weight's scales."""

    place: ScalePlace
    dtypes: tuple[str, ...]
    needed: bool = True

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of one scale on a rank. `dtype`: the scale's dtype in the file."""
        if self.place in (ScalePlace.BLOCK, ScalePlace.TILED):
            return 1
        return 2 if self.place is ScalePlace.GROUP and dtype != "fp32" else 4


FLOATS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Format:
    """A layer's tensors in a file of this format."""

    stored: str
    """Dtype of the weight in the file."""
    layout: str
    """comfy-kitchen's name of the format."""
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


_INPUT_SCALE = {"input_scale": ScaleLayout(ScalePlace.WHOLE, FLOATS, False)}
_FP8_SCALES = {"weight_scale": ScaleLayout(ScalePlace.ROW_OR_WHOLE, FLOATS), **_INPUT_SCALE}
_RELATIVE_SCALES = {
    "weight_s_rel": ScaleLayout(ScalePlace.BLOCK, ("fp8_e4m3fn", "U8", "fp32")),
    "weight_s_channel": ScaleLayout(ScalePlace.ROW, FLOATS),
}

FORMATS = {
    "float8_e4m3fn": Format("fp8_e4m3fn", "TensorCoreFP8Layout", _FP8_SCALES),
    "float8_e5m2": Format("fp8_e5m2", "TensorCoreFP8Layout", _FP8_SCALES),
    "int8_tensorwise": Format(
        "I8", "TensorWiseINT8Layout", {"weight_scale": ScaleLayout(ScalePlace.ROW_OR_WHOLE, FLOATS)}, rotated=True
    ),
    "nvfp4": Format(
        "U8",
        "TensorCoreNVFP4Layout",
        {
            "weight_scale": ScaleLayout(ScalePlace.TILED, ("fp8_e4m3fn", "U8")),
            "weight_scale_2": ScaleLayout(ScalePlace.WHOLE, FLOATS),
            **_INPUT_SCALE,
            "pre_quant_scale": ScaleLayout(ScalePlace.COLUMN, FLOATS, False),
        },
        block=16,
        bits=4,
    ),
    "mxfp8": Format(
        "fp8_e4m3fn",
        "TensorCoreMXFP8Layout",
        {"weight_scale": ScaleLayout(ScalePlace.TILED, ("F8_E8M0", "U8")), **_INPUT_SCALE},
        block=32,
    ),
    "convrot_w4a4": Format(
        "I8",
        "TensorCoreConvRotW4A4Layout",
        {"weight_scale": ScaleLayout(ScalePlace.ROW, FLOATS)},
        block=64,
        bits=4,
        rotated=True,
    ),
    "asym_w4a8_int8": Format(
        "I8",
        "AsymW4A8Int8Layout",
        {**_RELATIVE_SCALES, "weight_codebook": ScaleLayout(ScalePlace.WHOLE, FLOATS, False)},
        block=0,
        usual_block=16,
        bits=4,
        rotated=True,
    ),
    "w6a8_int8": Format(
        "I8",
        "AsymW4A8Int8Layout",
        _RELATIVE_SCALES,
        block=0,
        usual_block=16,
        bits=6,
        rotated=True,
    ),
    "awq_w4a16": Format(
        "I8",
        "TensorCoreAWQW4A16Layout",
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
        values = self.kitchen_tensor(packed, dtype).dequantize()
        return values * self.scales["pre_quant_scale"].to(dtype) if "pre_quant_scale" in self.scales else values

    def kitchen_tensor(self, packed: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the weight as comfy-kitchen's tensor, which expands to `dtype`, in the memory of `packed` and scales."""
        values, fields = self._kitchen_fields(packed)
        return kitchen_tensor(self.layer.format, values, (len(packed), self.columns(packed.shape[1])), dtype, fields)

    def _kitchen_fields(self, packed: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
        """Return the values in the dtype of comfy-kitchen's layout, and the layout's parameters by name."""
        layer, scales = self.layer, self.scales
        match layer.format:
            case "nvfp4":
                tiles = scales["weight_scale"].view(torch.float8_e4m3fn)
                return packed, {"scale": scales["weight_scale_2"].view(()), "block_scale": tiles}
            case "mxfp8":
                return packed.view(torch.float8_e4m3fn), {"scale": scales["weight_scale"].view(torch.float8_e8m0fnu)}
            case "int8_tensorwise":
                rotation = {"convrot": True, "convrot_groupsize": layer.rotation} if layer.rotation else {}
                return packed.view(torch.int8), {"scale": scales["weight_scale"], **rotation}
            case "convrot_w4a4":
                settings = {"convrot_groupsize": layer.rotation, "quant_group_size": layer.block}
                scale = scales["weight_scale"].view(-1)
                return packed.view(torch.int8), {"scale": scale, "linear_dtype": layer.linear_dtype, **settings}
            case "awq_w4a16":
                groups = {"scale": scales["weight_scale"], "zeros": scales["weight_zeros"]}
                return packed.view(torch.int8), {**groups, "group_size": layer.block}
        codebook = scales.get("weight_codebook")
        return packed.view(torch.int8), {
            "scale": scales["weight_s_rel"],
            "s_channel": scales["weight_s_channel"].view(-1),
            "codebook": None if codebook is None else codebook.view(-1),
            "group_size": layer.block,
            "convrot_groupsize": layer.rotation,
        }


def kitchen_tensor(
    format: str, values: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, fields: Mapping[str, object]
) -> Any:
    """Return a weight of `shape` [out, in] as comfy-kitchen's tensor, which expands to `dtype`. `fields`: of its Params."""
    tensors, layout = kitchen().tensors, FORMATS[format].layout
    assert tensors is not None, "`kitchen_lacks` refuses the file"
    return tensors.QuantizedTensor(
        values, layout, tensors.get_layout_class(layout).Params(orig_dtype=dtype, orig_shape=shape, **fields)
    )


def kitchen_lacks(format: str) -> str:
    """Return why the installed comfy-kitchen cannot read weights of a format. Empty: it can."""
    tensors = kitchen().tensors
    if tensors is None:
        return kitchen().word
    layout = FORMATS[format].layout
    known = hasattr(tensors, layout) and (format != "mxfp8" or hasattr(torch, "float8_e8m0fnu"))
    if format == "w6a8_int8":
        known = known and "bits" in inspect.signature(tensors.get_layout_class(layout).quantize).parameters
    return "" if known else "this comfy-kitchen or torch is too old for the format"


def quantise_int8(values: torch.Tensor) -> tuple[torch.Tensor, Quantised]:
    """Quantize a weight [rows, columns] to int8_tensorwise with a scale per row, rotated in the largest groups of 256, 64 or
    16 that divide `columns`. Returns [rows, columns] uint8 and its packing."""
    rotated = next((size for size in (256, 64, 16) if values.shape[1] % size == 0), 0)
    tensors, layer = kitchen().tensors, Layer("int8_tensorwise", rotated)
    if tensors is None:
        raise ValueError(f"weight_dtype: int8 needs ComfyUI's comfy-kitchen: {kitchen().word}.")
    rotation = {"convrot": True, "convrot_groupsize": layer.rotation} if layer.rotation else {}
    layout = tensors.get_layout_class(FORMATS[layer.format].layout)
    packed, params = layout.quantize(values.float(), per_channel=True, **rotation)
    return packed.view(torch.uint8), Quantised(layer, {"weight_scale": params.scale.view(-1, 1)})


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
    single = tensor.element_size() == 1  # some devices cannot cut and join float8, but all can as uint8
    blocks = tensor.view(torch.uint8) if single else tensor
    if place is ScalePlace.TILED:
        from comfy_kitchen import from_blocked, to_blocked

        blocks = from_blocked(blocks, size[0], size[1] // block)
    values = torch.cat([blocks[span.slice] for span in rows])
    values = torch.cat([values[:, span.start // block : span.stop // block] for span in columns], dim=1)
    if place is ScalePlace.TILED:
        return to_blocked(values, flatten=False)
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
