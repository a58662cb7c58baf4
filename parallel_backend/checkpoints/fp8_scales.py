"""ComfyUI's scaled fp8 files: which scale belongs to which weight. A weight's value is its stored value times its scale.

There are two layouts, and ComfyUI reads both (comfy/utils.py `convert_old_quants`, comfy/ops.py `_load_quantized_module`).
Old: a marker tensor `scaled_fp8`, and `<layer>.scale_weight`. New: `<layer>.weight_scale`, and the layer's format, as a
tensor `<layer>.comfy_quant` of JSON bytes or in the file's header. Only the new layout says which layers must have a scale.
"""

from collections.abc import Mapping
from dataclasses import replace

from .packed_formats import FP8_KINDS
from .tensor_files import Entry, read_formats

MARKER = "scaled_fp8"
FORMAT = ".comfy_quant"
SCALES = (".scale_weight", ".weight_scale")
INPUT_SCALES = (".scale_input", ".input_scale")
FORMATS = ("float8_e4m3fn", "float8_e5m2")


def attach_scales(name: str, entries: Mapping[str, Entry], stated: Mapping[str, str]) -> dict[str, Entry]:
    """`entries` of file `name` (key without prefix -> entry), with every scale moved into its weight's entry.

    `stated`: layer -> format, from the header. Scales without a weight stay entries. ValueError for formats other than fp8,
    for a missing scale, and for a scale of another shape than ComfyUI's.
    """
    rest = dict(entries)
    formats = {layer: how for layer, how in stated.items() if f"{layer}.weight" in rest}
    layers = [key.removesuffix(FORMAT) for key in rest if key.endswith(FORMAT)]
    formats |= read_formats({layer: rest.pop(layer + FORMAT) for layer in layers if f"{layer}.weight" in rest})
    for layer, how in formats.items():
        if how not in FORMATS:
            raise ValueError(
                f"model_name: {name} holds {layer}.weight in the format {how}, which this version cannot expand. Of "
                f"ComfyUI's quantised formats {' and '.join(FORMATS)} work, and so do GGUF, plain fp8, bf16 and fp16 files."
            )
    scaled = rest.pop(MARKER, None) is not None
    for key in list(rest):
        layer, weight = key.rpartition(".")[0], rest.get(key.rpartition(".")[0] + ".weight")
        if weight is None:
            continue
        if key.endswith(INPUT_SCALES):
            # With it ComfyUI rounds a layer's input to fp8, for products of fp8 matrices. Inputs are not rounded here.
            del rest[key]
        elif key.endswith(SCALES) and weight.scale is None:
            rest[f"{layer}.weight"] = replace(weight, scale=_checked(name, key, rest.pop(key), weight))
            scaled = True
    for key, entry in rest.items():
        fp8_matrix = key.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in FP8_KINDS
        expected = key.removesuffix(".weight") in formats if formats else scaled and fp8_matrix
        if expected and entry.scale is None:
            raise ValueError(
                f"model_name: {name} holds scaled weights, but lacks the scale of {key}. The file is damaged, or its "
                "conversion was stopped; use another copy."
            )
    return rest


def _checked(name: str, key: str, scale: Entry, weight: Entry) -> Entry:
    if scale.dtype in ("fp32", "bf16", "fp16") and (
        all(size == 1 for size in scale.shape) or scale.shape == (weight.shape[0], 1)
    ):
        return scale
    raise ValueError(
        f"model_name: {name} holds {key} as {scale.dtype} of shape {list(scale.shape)}; scales of a whole weight or of each "
        "of its rows can be used."
    )
