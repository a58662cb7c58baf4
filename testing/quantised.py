"""Files in ComfyUI's quantised formats, made by comfy-kitchen's quantisers."""

import inspect
import json

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

Tensors = dict[str, torch.Tensor]

CODEBOOK = torch.linspace(-1, 1, 16).pow(3) * 0.3 + torch.linspace(-1, 1, 16) * 0.7
"""Given, since to fit one takes time."""
INT8 = {"per_channel": True}
KINDS: dict[str, tuple[str, str, dict[str, object]]] = {
    "fp8": ("float8_e4m3fn", "TensorCoreFP8Layout", {}),
    "int8": ("int8_tensorwise", "TensorWiseINT8Layout", INT8),
    "int8, one scale": ("int8_tensorwise", "TensorWiseINT8Layout", {}),
    "int8, rotated by 16": ("int8_tensorwise", "TensorWiseINT8Layout", INT8 | {"convrot": True, "convrot_groupsize": 16}),
    "int8, rotated": ("int8_tensorwise", "TensorWiseINT8Layout", INT8 | {"convrot": True, "convrot_groupsize": 64}),
    "nvfp4": ("nvfp4", "TensorCoreNVFP4Layout", {}),
    "mxfp8": ("mxfp8", "TensorCoreMXFP8Layout", {}),
    "w4a4": ("convrot_w4a4", "TensorCoreConvRotW4A4Layout", {"convrot_groupsize": 64}),
    "w4a8": ("asym_w4a8_int8", "AsymW4A8Int8Layout", {"convrot_groupsize": 64, "codebook_tensor": CODEBOOK}),
    "w4a8, no codebook": ("asym_w4a8_int8", "AsymW4A8Int8Layout", {"convrot_groupsize": 64, "codebook": False}),
    **(
        {"w6a8": ("w6a8_int8", "AsymW4A8Int8Layout", {"convrot_groupsize": 64, "bits": 6, "scale_search": False})}
        if "bits" in inspect.signature(get_layout_class("AsymW4A8Int8Layout").quantize).parameters
        else {}  # comfy-kitchen is older than 0.2.36
    ),
    "w4a16": ("awq_w4a16", "TensorCoreAWQW4A16Layout", {"group_size": 64}),
}
"""Name -> ComfyUI's format, comfy-kitchen's layout, and what it is made with."""
SLOW = ("w4a8",)
"""To make."""
SAID = ("convrot", "convrot_groupsize", "group_size")
"""What a file says of those."""


def quantised(weight: torch.Tensor, kind: str) -> QuantizedTensor:
    """Of a weight [out, in] float32."""
    _, layout, settings = KINDS[kind]
    return awq(weight, **settings) if kind == "w4a16" else QuantizedTensor.from_float(weight, layout, **settings)


def awq(weight: torch.Tensor, group_size: int) -> QuantizedTensor:
    """Of a weight [out, in] float32: 16 even steps from each group's least value to its largest. comfy-kitchen has no
    quantiser of this format."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().to(torch.uint8).flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    layout = get_layout_class(KINDS["w4a16"][1])
    of_groups = [each.squeeze(-1).t().contiguous() for each in (scale, low + 8 * scale)]
    fields = {"scale": of_groups[0], "zeros": of_groups[1], "group_size": group_size}
    params = layout.Params(**fields, orig_dtype=weight.dtype, orig_shape=tuple(weight.shape))
    return QuantizedTensor(packed, KINDS["w4a16"][1], params)


def settings(kind: str, **more: object) -> dict[str, object]:
    """The entries that a file has about a layer."""
    format, _, made = KINDS[kind]
    return {"format": format} | {name: made[name] for name in SAID if name in made} | more


def marked(how: dict[str, object]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(how).encode()), dtype=torch.uint8)


def stored(layer: str, weight: torch.Tensor, kind: str, **more: object) -> Tensors:
    """A layer's tensors in a file. `more`: other settings of it."""
    whole = quantised(weight, kind)
    tensors = get_layout_class(whole._layout_cls).state_dict_tensors(whole._qdata, whole._params)
    return {f"{layer}.weight{suffix}": tensor.clone() for suffix, tensor in tensors.items()} | {
        f"{layer}.comfy_quant": marked(settings(kind, **more))
    }


def quantise_blocks(state: Tensors, kind: str, multiple: int = 64) -> tuple[Tensors, Tensors]:
    """(what the file holds, the values that it stands for in float32): matrices of blocks are quantised.

    Those whose columns are no `multiple` of a group of values stay, as converters leave them; of SLOW only some are.
    """
    made, values, place = {}, {}, "blocks.1." if kind in SLOW else "blocks."
    for key, value in state.items():
        if key.endswith(".weight") and value.ndim == 2 and place in key and value.shape[1] % multiple == 0:
            made |= stored(key.removesuffix(".weight"), value, kind)
            values[key] = quantised(value, kind).dequantize()
        else:
            made[key] = values[key] = value
    return made, values
