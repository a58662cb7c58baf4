"""Attaches the scales in ComfyUI's quantized files to their weights, and checks that all are present and match.

ComfyUI reads two layouts (comfy/utils.py `convert_old_quants`, comfy/ops.py `_load_quantized_module`). The old one, for fp8
only, has a marker tensor `scaled_fp8`, and `<layer>.scale_weight`. The new one has `<layer>.weight_scale` and others
(`FORMATS`), and each layer's format as a tensor `<layer>.comfy_quant` of JSON bytes, or in the file's header. Only the new
layout states which layers must have a scale.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallel_backend.core.short_text import short

from .packed_formats import FP8_KINDS, tiled_shape
from .quantised_formats import CODES, FORMATS, FP8_FORMATS, KEPT, ROTATIONS, Layer, ScaleLayout, ScalePlace
from .tensor_files import Entry, MappedFile

QUANTISATION = "_quantization_metadata"
"""Entry of a safetensors header, in which ComfyUI's files may name the formats of quantized layers (JSON)."""
MARKER = "scaled_fp8"
SETTINGS = ".comfy_quant"
FULL_PRECISION = "full_precision_matrix_mult"
OLD_NAMES = {".scale_weight": "weight_scale", ".scale_input": "input_scale"}
BLOCKS = 4, 8, *range(16, 1025, 16)
"""Allowed values of group_size, for formats whose settings have it."""
SCALE, INPUT_SCALE = "weight_scale", "input_scale"


def attach_quantisation(
    name: str, entries: Mapping[str, Entry], stated: Mapping[str, Any], file: MappedFile
) -> dict[str, Entry]:
    """`entries` of a file (key without prefix -> entry), with a weight's scales and settings moved into its entry.

    `name`: the file's, to show. `stated`: layer -> its settings in the file's header. Scales that belong to no weight stay
    in the result, for the caller to use or refuse. Raises ValueError for an unknown format, and for tensors or settings that
    are missing or do not fit the weight.
    """
    rest = dict(entries)
    layers = [key.removesuffix(SETTINGS) for key in rest if key.endswith(SETTINGS)]
    of_layers = file.objects({layer: rest.pop(layer + SETTINGS) for layer in layers if f"{layer}.weight" in rest})
    settings = {layer: each for layer, each in {**stated, **of_layers}.items() if f"{layer}.weight" in rest}
    for layer, layer_settings in settings.items():
        if not isinstance(layer_settings, dict):
            raise ValueError(
                f"model_name: {name} cannot be read. It is damaged or incomplete (a layer's format is not a JSON object)."
            )
        kind = layer_settings.get("format")
        if not isinstance(kind, str) or kind not in FORMATS:
            raise ValueError(
                f"model_name: {name} has {short(layer)}.weight in the format {short(kind)}, which this version cannot "
                f"read. Of ComfyUI's quantised formats {', '.join(FORMATS)} work, and so do GGUF, plain fp8, bf16 and "
                "fp16 files."
            )
        if kind in KEPT:
            rest[f"{layer}.weight"] = _kept(name, layer, layer_settings, rest)
    marker = rest.pop(MARKER, None)
    # In an old file a marker of two elements means that all layers multiply in full precision.
    full_precision = marker is not None and marker.shape == (2,)
    scaled = marker is not None
    for key in list(rest):
        layer, weight = key.rpartition(".")[0], rest.get(key.rpartition(".")[0] + ".weight")
        leaf = OLD_NAMES.get(key.removeprefix(layer), key.removeprefix(f"{layer}."))
        if weight is None or leaf not in (SCALE, INPUT_SCALE) or weight.dtype in KEPT or leaf in weight.scales:
            continue
        scale = _checked(name, key, rest.pop(key), weight, FORMATS["float8_e4m3fn"].scales[leaf])
        rest[f"{layer}.weight"] = replace(weight, scales={**weight.scales, leaf: scale})
        scaled |= leaf == SCALE
    for key, entry in rest.items():
        fp8_matrix = key.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in FP8_KINDS
        stated_of_layer = settings.get(key.removesuffix(".weight"))
        if (stated_of_layer is not None or (fp8_matrix and scaled and not settings)) and entry.dtype not in KEPT:
            if SCALE not in entry.scales:
                rest[key] = replace(entry, lacks_scale=True)
            elif len(entry.shape) == 2 and stated_of_layer is not None:
                full = bool(stated_of_layer.get(FULL_PRECISION, False))
                rest[key] = replace(entry, layer=Layer(stated_of_layer["format"], full_precision=full))
            elif fp8_matrix:
                kind = next(kind for kind, stored in FP8_FORMATS.items() if stored == entry.dtype)
                rest[key] = replace(entry, layer=Layer(kind, full_precision=full_precision))
    return rest


def _kept(name: str, layer: str, settings: Mapping[str, Any], rest: dict[str, Entry]) -> Entry:
    """Return the weight's entry with its scales, and remove them from `rest`."""
    key, kind = f"{layer}.weight", settings["format"]
    weight, known = rest[key], FORMATS[kind]
    if weight.dtype != known.stored or len(weight.shape) != 2:
        raise ValueError(
            f"model_name: {name} says that {short(key)} is in the format {kind}, but has it as {short(weight.dtype)} of "
            f"shape {short(list(weight.shape))}. The file is damaged. Use another copy."
        )
    rows, columns = weight.shape[0], weight.shape[1] * 8 // known.bits
    weight = replace(weight, shape=(rows, columns), dtype=kind, layer=_layer(name, layer, settings, columns))
    scales = {}
    for leaf, expected in known.scales.items():
        scale = rest.pop(f"{layer}.{leaf}", None)
        if scale is not None:
            scales[leaf] = _checked(name, f"{layer}.{leaf}", scale, weight, expected)
        elif expected.needed:
            raise ValueError(
                f"model_name: {name} has {short(key)} in the format {kind}, but lacks {short(layer)}.{leaf}, which the "
                "format needs. The file is damaged, or its conversion was stopped. Use another copy."
            )
    return replace(weight, scales=scales)


def _layer(name: str, layer: str, settings: Mapping[str, Any], columns: int) -> Layer:
    """Return the Layer for these settings and a format of KEPT. Raises ValueError if they do not match the weight's
    columns."""
    kind, known = settings["format"], FORMATS[settings["format"]]
    params, full_precision = settings.get("params"), bool(settings.get(FULL_PRECISION, False))
    settings = {**(params if isinstance(params, dict) else {}), **settings}
    rotated = known.rotated and (kind != "int8_tensorwise" or bool(settings.get("convrot", False)))
    rotation = settings.get("convrot_groupsize", 256) if rotated else 0
    block = known.block or settings.get("group_size", known.usual_block)
    for setting, value, fits in (
        ("convrot_groupsize", rotation, not rotated or (type(rotation) is int and rotation in ROTATIONS)),
        ("group_size", block, known.block or (type(block) is int and block in BLOCKS and columns % 16 == 0)),
        ("group_size", block, kind != "w6a8_int8" or (block % 16 == 0 and columns % 32 == 0)),
    ):
        if not fits or (value and columns % value):
            raise ValueError(
                f"model_name: {name} says that {short(layer)}.weight has {setting} {short(value)}, which the format "
                f"{kind} cannot have with {columns} columns. The file is damaged, or comes from a tool that ComfyUI does "
                "not know."
            )
    dtype = settings.get("linear_dtype", "int4")
    if dtype not in ("int4", "int8"):
        raise ValueError(
            f"model_name: {name} says that {short(layer)}.weight has linear_dtype {short(dtype)}; int4 and int8 are known."
        )
    return Layer(kind, rotation, block, full_precision, dtype, columns if kind == "w6a8_int8" else 0)


def _checked(name: str, key: str, scale: Entry, weight: Entry, expected: ScaleLayout) -> Entry:
    """Return `scale`. Raises ValueError if it does not have the shape and a dtype of the expected layout."""
    rows, columns = weight.shape[0], weight.shape[-1]
    by_row = scale.shape == (rows, 1) or (weight.dtype in KEPT and scale.shape == (rows,))
    blocks = (rows, columns // weight.layer.block) if weight.layer else ()
    whole = all(size == 1 for size in scale.shape)
    fits = {
        ScalePlace.WHOLE: scale.shape == (CODES,) if key.endswith("codebook") else whole,
        ScalePlace.ROW: by_row,
        ScalePlace.ROW_OR_WHOLE: by_row or whole,
        ScalePlace.COLUMN: scale.shape == (columns,),
        ScalePlace.BLOCK: scale.shape == blocks,
        ScalePlace.GROUP: scale.shape == blocks[::-1],
        ScalePlace.TILED: bool(blocks) and scale.shape == tiled_shape(*blocks),
    }
    if scale.dtype in expected.dtypes and fits[expected.place]:
        return scale
    by_values = expected.place in (ScalePlace.BLOCK, ScalePlace.GROUP, ScalePlace.TILED)
    usable = "scales of other values" if by_values else "scales of a whole weight or of each of its rows"
    raise ValueError(
        f"model_name: {name} has {short(key)} as {short(scale.dtype)} of shape {short(list(scale.shape))} beside a "
        f"weight of shape {short(list(weight.shape))}; {usable} can be used."
    )
