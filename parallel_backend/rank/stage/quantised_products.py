"""Products with quantized weights by comfy-kitchen, ComfyUI's kernel library, if ComfyUI would use it on the device.

The rules are those of comfy/ops.py (`mixed_precision_ops`, `pick_operations`) and comfy/model_management.py
(`supports_fp8_compute` and similar functions). int8 and the 4-bit integer formats multiply on every device; awq_w4a16
expands the weight for products of more than some rows. fp8, nvfp4 and mxfp8 multiply on GPUs that support them and pass a
trial. All other weights are expanded. comfy-kitchen chooses among its kernels. Without the package this project expands all
weights.
"""

import functools
import inspect
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from parallel_backend.checkpoints.packed_formats import FP8_KINDS, Fp8, Packing
from parallel_backend.checkpoints.quantised_formats import Quantised
from parallel_backend.core.kitchen import kitchen

log = logging.getLogger(__name__)

LAYOUTS = {
    "float8_e4m3fn": "TensorCoreFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout",
    "nvfp4": "TensorCoreNVFP4Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
    "convrot_w4a4": "TensorCoreConvRotW4A4Layout",
    "asym_w4a8_int8": "AsymW4A8Int8Layout",
    "w6a8_int8": "AsymW4A8Int8Layout",
    "awq_w4a16": "TensorCoreAWQW4A16Layout",
}
"""Format -> comfy-kitchen's name of its layout."""

CAPABILITY = {"float8_e4m3fn": (8, 9), "nvfp4": (10, 0), "mxfp8": (10, 0)}
"""Compute capability of NVIDIA GPUs from which ComfyUI multiplies in a format. For these formats the layer's input is
rounded to the format before the product; for all others the product does it."""

PRODUCT_FAILS = "comfy-kitchen's product fails here"
TRIAL_SIZE = 128
"""Rows, inputs and outputs of a trial's product: a multiple of all block and tile sizes."""

ALIGNED = 16
"""Rows and columns of weights in CAPABILITY's formats must be multiples of this, or the kernel refuses them."""


class KitchenWeight:
    """A packed weight [out, in] as comfy-kitchen's tensor, in the same memory."""

    def __init__(self, tensors: ModuleType, packed: torch.Tensor, packing: Packing, dtype: torch.dtype, multiplies: bool):
        """`packed`: [out, n] uint8. `multiplies`: use comfy-kitchen's products; otherwise expand to `dtype` at each use."""
        self.multiplies = multiplies
        self.smoothing = self.input_scale = None
        if isinstance(packing, Fp8):
            format, data = "float8_e4m3fn", packed.view(FP8_KINDS[packing.kind])
            one = torch.ones((), device=packed.device)
            fields: dict[str, object] = {"scale": one if packing.scale is None else packing.scale.view(())}
            if packing.scale is not None:  # a file with scales; else the input's scale is that of its largest value
                self.input_scale = one if packing.input_scale is None else packing.input_scale.view(())
        else:
            assert isinstance(packing, Quantised)
            format, data = packing.layer.format, packed
            fields, data = _fields(packing, packed)
            self.smoothing = packing.scales.get("pre_quant_scale")
            input_scale = packing.scales.get("input_scale")
            self.input_scale = None if input_scale is None else input_scale.view(())
        self.format, self._layout, self._tensor_class = format, LAYOUTS[format], tensors.QuantizedTensor
        self._rounds_input = format in CAPABILITY
        shape = packed.shape[0], packing.columns(packed.shape[1])
        params = tensors.get_layout_class(self._layout).Params(orig_dtype=dtype, orig_shape=shape, **fields)
        self.weight = tensors.QuantizedTensor(data, self._layout, params)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the product [..., in] -> [..., out]."""
        if not x.numel():  # kernels refuse an input without rows, which a band without text is
            return x.new_empty(*x.shape[:-1], self.weight.shape[0])
        if self.smoothing is not None:
            x = x * self.smoothing.to(x.dtype)
        if not self.multiplies:
            return F.linear(x, self.weight.dequantize(), bias)
        if not self._rounds_input:
            return F.linear(x, self.weight, bias).to(x.dtype)  # awq_w4a16 computes in its scales' dtype
        rows = self._tensor_class.from_float(x.reshape(-1, x.shape[-1]), self._layout, scale=self.input_scale)
        return F.linear(rows, self.weight, bias).reshape(*x.shape[:-1], -1)


def _fields(packing: Quantised, packed: torch.Tensor) -> tuple[dict[str, object], torch.Tensor]:
    """Return (parameters of comfy-kitchen's layout by name, the weight's values in the dtype that the layout needs)."""
    layer, scales = packing.layer, packing.scales
    match layer.format:
        case "nvfp4":
            tiles = scales["weight_scale"].view(torch.float8_e4m3fn)
            return {"scale": scales["weight_scale_2"].view(()), "block_scale": tiles}, packed
        case "mxfp8":
            return {"scale": scales["weight_scale"].view(torch.float8_e8m0fnu)}, packed.view(torch.float8_e4m3fn)
        case "int8_tensorwise":
            rotation = {"convrot": True, "convrot_groupsize": layer.rotation} if layer.rotation else {}
            return {"scale": scales["weight_scale"], **rotation}, packed.view(torch.int8)
        case "convrot_w4a4":
            scale = scales["weight_scale"].view(-1)
            settings = {"convrot_groupsize": layer.rotation, "quant_group_size": layer.block}
            return {"scale": scale, "linear_dtype": layer.linear_dtype, **settings}, packed.view(torch.int8)
        case "awq_w4a16":
            groups = {"scale": scales["weight_scale"], "zeros": scales["weight_zeros"]}
            return {**groups, "group_size": layer.block}, packed.view(torch.int8)
    codebook = scales.get("weight_codebook")
    return {
        "scale": scales["weight_s_rel"],
        "s_channel": scales["weight_s_channel"].view(-1),
        "codebook": None if codebook is None else codebook.view(-1),
        "group_size": layer.block,
        "convrot_groupsize": layer.rotation,
    }, packed.view(torch.int8)


@dataclass(frozen=True)
class Arithmetic:
    """How a layer multiplies. `weight`: None if this project expands the packed weight. `word`: the arithmetic, as user
    text."""

    weight: KitchenWeight | None
    word: str


def arithmetic(packed: torch.Tensor, packing: Packing, dtype: torch.dtype) -> Arithmetic:
    """Return how a layer multiplies an input of `dtype` by the packed weight [out, n] uint8 on its device."""
    if isinstance(packing, Fp8):
        format = "float8_e4m3fn" if packing.kind == "fp8_e4m3fn" else "float8_e5m2"
        full_precision = packing.full_precision
    elif isinstance(packing, Quantised):
        format, full_precision = packing.layer.format, packing.layer.full_precision
    else:
        return Arithmetic(None, "")
    reason = _obstacle(format, packed, packing, dtype) or ("the file asks for it" if full_precision else "")
    expanded = f"{format} expanded to {str(dtype).removeprefix('torch.')}"
    if reason and isinstance(packing, Fp8):
        return Arithmetic(None, f"{expanded}: {reason}")
    tensors, word = kitchen().tensors, kitchen().word
    if tensors is None or not _knows(tensors, format):
        return Arithmetic(None, f"{expanded}: {word or 'this comfy-kitchen or torch is too old for the format'}")
    if not reason and format in CAPABILITY and (failure := trial(tensors, format, dtype, packed.device)):
        reason = f"{PRODUCT_FAILS} ({failure})"
        if isinstance(packing, Fp8):
            return Arithmetic(None, f"{expanded}: {reason}")
    weight = KitchenWeight(tensors, packed, packing, dtype, not reason)
    if reason:
        return Arithmetic(weight, f"{expanded}: {reason}")
    return Arithmetic(weight, f"{format} multiplied by comfy-kitchen" + (f" ({word})" if word else ""))


def _knows(tensors: ModuleType, format: str) -> bool:
    """Whether this comfy-kitchen with this torch has the format."""
    if not hasattr(tensors, LAYOUTS[format]) or (format == "mxfp8" and not hasattr(torch, "float8_e8m0fnu")):
        return False
    layout = tensors.get_layout_class(LAYOUTS[format])
    return format != "w6a8_int8" or "bits" in inspect.signature(layout.quantize).parameters


@functools.cache
def trial(tensors: ModuleType, format: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why comfy-kitchen does not multiply in a format of CAPABILITY on the device, found by one product. Empty: it does.

    If a kernel raises, comfy-kitchen's `linear` expands both factors instead, and only its log says so. `tensors`: see
    Kitchen.
    """
    expanded = False
    plain: Any = tensors.QuantizedTensor

    class Watched(plain):
        def dequantize(self) -> torch.Tensor:
            nonlocal expanded
            expanded = True
            return super().dequantize()

    with torch.inference_mode():  # as in a micro-step: outside of it torch takes `linear` apart
        ones = torch.ones(TRIAL_SIZE, TRIAL_SIZE, dtype=dtype, device=device)
        try:
            rows, weight = (made.from_float(ones, LAYOUTS[format]) for made in (Watched, plain))
            F.linear(rows, weight, ones[0]).cpu()  # waits: a kernel's failure shows when the host does
        except (RuntimeError, TypeError, ValueError) as error:  # torch's own refusals of shapes and scales are ValueErrors
            log.warning("comfy-kitchen's product in %s: %s", format, error)
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return "the rank's log says why" if expanded else ""


def _obstacle(format: str, packed: torch.Tensor, packing: Packing, dtype: torch.dtype) -> str:
    """Return why comfy-kitchen cannot multiply in a format on the weight's device. Empty: it can."""
    if format == "float8_e5m2":
        return "GPUs cannot multiply two tensors of this format"
    if format not in CAPABILITY:
        return ""
    if isinstance(packing, Fp8) and packing.scale is not None and packing.scale.numel() > 1:
        return "products need one scale for the whole weight"
    if packed.device.type != "cuda" or torch.version.hip is not None:
        return "this device cannot multiply in this format"
    if torch.cuda.get_device_capability(packed.device) < CAPABILITY[format]:
        return "this GPU cannot multiply in this format"
    if format == "mxfp8" and not hasattr(F, "scaled_mm"):
        return "torch is older than 2.10"
    if dtype not in (torch.bfloat16, torch.float16):
        return "weight_dtype asks for more"
    if packed.shape[0] % ALIGNED or packing.columns(packed.shape[1]) % ALIGNED:
        return f"a side is not a multiple of {ALIGNED}"
    return ""
