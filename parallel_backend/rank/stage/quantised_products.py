"""Products with quantised weights by comfy-kitchen, ComfyUI's kernel library, if ComfyUI would use it on the device.

The rules are those of comfy/ops.py (`mixed_precision_ops`, `pick_operations`) and comfy/model_management.py
(`supports_fp8_compute` and similar functions). int8 and the 4-bit integer formats multiply on every device, awq_w4a16 by
expanding a weight for each product of more than some rows; fp8, nvfp4 and
mxfp8 on GPUs that support them, and on which a trial works. All other weights are expanded. comfy-kitchen chooses among its
kernels.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from parallel_backend.checkpoints.packed_formats import FP8_KINDS, Fp8, Packing
from parallel_backend.checkpoints.quantised_formats import FORMATS, Quantised, kitchen_tensor
from parallel_backend.core.kitchen import kitchen

log = logging.getLogger(__name__)

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

    def __init__(self, packed: torch.Tensor, packing: Fp8 | Quantised, dtype: torch.dtype, multiplies: bool):
        """`packed`: [out, n] uint8. `multiplies`: use comfy-kitchen's products; otherwise expand to `dtype` at each use."""
        self.multiplies = multiplies
        self.smoothing = self.input_scale = None
        if isinstance(packing, Fp8):
            one = torch.ones((), device=packed.device)
            scale = {"scale": one if packing.scale is None else packing.scale.view(())}
            values, shape = packed.view(FP8_KINDS[packing.kind]), (packed.shape[0], packed.shape[1])
            self.format, self.weight = "float8_e4m3fn", kitchen_tensor("float8_e4m3fn", values, shape, dtype, scale)
            if packing.scale is not None:  # a file with scales; else the input's scale is that of its largest value
                self.input_scale = one if packing.input_scale is None else packing.input_scale.view(())
        else:
            self.format, self.weight = packing.layer.format, packing.kitchen_tensor(packed, dtype)
            self.smoothing = packing.scales.get("pre_quant_scale")
            input_scale = packing.scales.get("input_scale")
            self.input_scale = None if input_scale is None else input_scale.view(())

    def linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        expanded: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Return the product [..., in] -> [..., out]. `expanded`: returns the weight in the compute dtype, by the function
        that expands it or as it was kept."""
        if not x.numel():  # kernels refuse an input without rows, which a band without text is
            return x.new_empty(*x.shape[:-1], self.weight.shape[0])
        if self.smoothing is not None:
            x = x * self.smoothing.to(x.dtype)
        if not self.multiplies:
            return F.linear(x, expanded(self.weight.dequantize), bias)
        if self.format not in CAPABILITY:
            return F.linear(x, self.weight, bias).to(x.dtype)  # awq_w4a16 computes in its scales' dtype
        rows = type(self.weight).from_float(x.reshape(-1, x.shape[-1]), FORMATS[self.format].layout, scale=self.input_scale)
        return F.linear(rows, self.weight, bias).reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Arithmetic:
    """How a layer multiplies. `weight`: None if Packing.expand expands it. `word`: the same for users to read."""

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
    package = kitchen()
    reason = _obstacle(format, packed, packing, dtype) or ("the file asks for it" if full_precision else "")
    if not reason and package.tensors is None:  # the file has fp8: others are refused without the package
        reason = package.word
    if not reason and format in CAPABILITY and (failure := trial(format, dtype, packed.device)):
        reason = f"{PRODUCT_FAILS} ({failure})"
    weight = None if reason and isinstance(packing, Fp8) else KitchenWeight(packed, packing, dtype, not reason)
    if reason:
        return Arithmetic(weight, f"{format} expanded to {str(dtype).removeprefix('torch.')}: {reason}")
    return Arithmetic(weight, f"{format} multiplied by comfy-kitchen" + (f" ({package.word})" if package.word else ""))


@functools.cache
def trial(format: str, dtype: torch.dtype, device: torch.device) -> str:
    """Why comfy-kitchen does not multiply in a format of CAPABILITY on the device, found by one product. Empty: it does.

    Where a kernel raises, its `linear` expands both factors and goes on, and only the log says so.
    """
    expanded = False
    tensors: Any = kitchen().tensors
    plain: Any = tensors.QuantizedTensor

    class Watched(plain):
        def dequantize(self) -> torch.Tensor:
            nonlocal expanded
            expanded = True
            return super().dequantize()

    with torch.inference_mode():  # as in a micro-step: outside of it torch takes `linear` apart
        ones = torch.ones(TRIAL_SIZE, TRIAL_SIZE, dtype=dtype, device=device)
        try:
            rows, weight = (made.from_float(ones, FORMATS[format].layout) for made in (Watched, plain))
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
