"""Which tensors of ComfyUI's quantised files belong to which weight, and whether all are there and fit.

ComfyUI reads two ways to write them (comfy/utils.py `convert_old_quants`, comfy/ops.py `_load_quantized_module`). Old, fp8
only: a marker tensor `scaled_fp8`, and `<layer>.scale_weight`. New: `<layer>.weight_scale` and others (`FORMATS`), and
what the layer's format is as a tensor `<layer>.comfy_quant` of JSON bytes or in the file's header. Only the new one says of
each layer whether it has to have a scale.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .packed_formats import FP8_KINDS
from .quantised_formats import CODES, FLOATS, FORMATS, KEPT, ROTATIONS, Layer, ScaleLayout, ScalePlace, tiled_shape
from .tensor_files import Entry, read_settings

MARKER = "scaled_fp8"
SETTINGS = ".comfy_quant"
OLD_NAMES = {".scale_weight": "weight_scale", ".scale_input": "input_scale"}
BLOCKS = 4, 8, *range(16, 1025, 16)
"""What group_size of asym_w4a8_int8 may be."""
SCALE, INPUT_SCALE = "weight_scale", "input_scale"


def attach_quantisation(name: str, entries: Mapping[str, Entry], stated: Mapping[str, dict[str, Any]]) -> dict[str, Entry]:
    """`entries` of file `name` (key without prefix -> entry), with what belongs to a weight at it and no longer by itself.

    `stated`: layer -> its settings, from the header. What belongs to no weight stays: a use for it is up to the caller.
    ValueError for a format that is not known, and for tensors or settings that are missing or do not fit the weight.
    """
    rest = dict(entries)
    settings = {layer: how for layer, how in stated.items() if f"{layer}.weight" in rest}
    layers = [key.removesuffix(SETTINGS) for key in rest if key.endswith(SETTINGS)]
    settings |= read_settings({layer: rest.pop(layer + SETTINGS) for layer in layers if f"{layer}.weight" in rest})
    for layer, how in settings.items():
        kind = how.get("format")
        if kind not in FORMATS:
            raise ValueError(
                f"model_name: {name} holds {layer}.weight in the format {kind}, which this version cannot read. Of "
                f"ComfyUI's quantised formats {', '.join(FORMATS)} work, and so do GGUF, plain fp8, bf16 and fp16 files."
            )
        if kind in KEPT:
            rest[f"{layer}.weight"] = _kept(name, layer, how, rest)
    marker = rest.pop(MARKER, None)
    in_full = marker is not None and marker.shape == (2,)  # how an old file says that its layers multiply in full
    scaled = marker is not None
    for key in list(rest):
        layer, weight = key.rpartition(".")[0], rest.get(key.rpartition(".")[0] + ".weight")
        leaf = OLD_NAMES.get(key.removeprefix(layer), key.removeprefix(f"{layer}."))
        if weight is None or leaf not in (SCALE, INPUT_SCALE) or weight.dtype in KEPT or leaf in weight.scales:
            continue
        scale = _checked(name, key, rest.pop(key), weight, FORMATS["float8_e4m3fn"].scales[leaf])
        rest[f"{layer}.weight"] = replace(weight, scales=weight.scales | {leaf: scale})
        scaled |= leaf == SCALE
    for key, entry in rest.items():
        layer = key.removesuffix(".weight")
        fp8_matrix = key.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in FP8_KINDS
        how = settings.get(layer)
        if (how is not None or (fp8_matrix and scaled and not settings)) and entry.dtype not in KEPT:
            if SCALE not in entry.scales:
                raise ValueError(
                    f"model_name: {name} holds scaled weights, but lacks the scale of {key}. The file is damaged, or its "
                    "conversion was stopped; use another copy."
                )
            if fp8_matrix:
                full = in_full if how is None else bool(how.get("full_precision_matrix_mult", False))
                rest[key] = replace(entry, layer=Layer(_fp8_format(entry.dtype), full_precision=full))
    return rest


def _fp8_format(dtype: str) -> str:
    return next(name for name, known in FORMATS.items() if known.stored == dtype and name not in KEPT)


def _kept(name: str, layer: str, how: Mapping[str, Any], rest: dict[str, Entry]) -> Entry:
    """The weight's entry, with the tensors beside it, which are taken out of `rest`."""
    key, known = f"{layer}.weight", FORMATS[how["format"]]
    weight = rest[key]
    if weight.dtype != known.stored or len(weight.shape) != 2:
        raise ValueError(
            f"model_name: {name} says that {key} is in the format {how['format']}, but holds it as {weight.dtype} of shape "
            f"{list(weight.shape)}. The file is damaged; use another copy."
        )
    weight = replace(weight, shape=(weight.shape[0], weight.shape[1] * known.per_byte), dtype=how["format"])
    said = _layer(name, layer, how, weight.shape[1])
    weight = replace(weight, layer=said)
    scales = {}
    for leaf, expected in known.scales.items():
        found = rest.pop(f"{layer}.{leaf}", None)
        if found is not None:
            scales[leaf] = _checked(name, f"{layer}.{leaf}", found, weight, expected)
        elif expected.needed:
            raise ValueError(
                f"model_name: {name} holds {key} in the format {how['format']}, but lacks {layer}.{leaf}, the scale that it "
                "has to have. The file is damaged, or its conversion was stopped; use another copy."
            )
    return replace(weight, scales=scales)


def _layer(name: str, layer: str, how: Mapping[str, Any], columns: int) -> Layer:
    """What the settings of a layer in one of KEPT say. ValueError where they do not fit its columns."""
    kind, known = how["format"], FORMATS[how["format"]]
    inner = how.get("params") if isinstance(how.get("params"), dict) else {}

    def said(setting: str, usual: Any) -> Any:
        return how.get(setting, inner.get(setting, usual))

    rotated = known.rotated and (kind != "int8_tensorwise" or bool(said("convrot", False)))
    rotation, block = said("convrot_groupsize", 256) if rotated else 0, known.block or said("group_size", 16)
    for setting, value, fits in (
        ("convrot_groupsize", rotation, not rotated or rotation in ROTATIONS),
        ("group_size", block, known.block or (type(block) is int and block in BLOCKS and columns % 16 == 0)),
    ):
        if not fits or (value and columns % value):
            raise ValueError(
                f"model_name: {name} says that {layer}.weight has {setting} {value}, which the format {kind} cannot have "
                f"with {columns} columns. The file is damaged, or made by a tool that ComfyUI does not know."
            )
    dtype = said("linear_dtype", "int4")
    if dtype not in ("int4", "int8"):
        raise ValueError(f"model_name: {name} says that {layer}.weight has linear_dtype {dtype}; int4 and int8 are known.")
    return Layer(kind, rotation, block, bool(how.get("full_precision_matrix_mult", False)), dtype)


def _checked(name: str, key: str, scale: Entry, weight: Entry, expected: ScaleLayout) -> Entry:
    """`scale` again. ValueError unless it has the shape and a dtype of what it is said to be."""
    rows, columns = weight.shape[0], weight.shape[-1]
    by_row = scale.shape == (rows, 1) or (weight.dtype in KEPT and scale.shape == (rows,))
    blocks = (rows, columns // weight.layer.block) if weight.layer else ()
    whole = all(size == 1 for size in scale.shape)
    fits = {
        ScalePlace.WHOLE: whole or (key.endswith("codebook") and scale.shape == (CODES,)),
        ScalePlace.ROW: by_row,
        ScalePlace.ROW_OR_WHOLE: by_row or whole,
        ScalePlace.COLUMN: scale.shape == (columns,),
        ScalePlace.BLOCK: scale.shape == blocks,
        ScalePlace.TILED: bool(blocks) and scale.shape == tiled_shape(*blocks),
    }
    if scale.dtype in expected.dtypes and fits[expected.place]:
        return scale
    what = "scales of a whole weight or of each of its rows" if expected.dtypes == FLOATS else "scales of other values"
    raise ValueError(
        f"model_name: {name} holds {key} as {scale.dtype} of shape {list(scale.shape)} beside a weight of shape "
        f"{list(weight.shape)}; {what} can be used."
    )
