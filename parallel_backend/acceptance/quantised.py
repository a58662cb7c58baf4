"""Checks one layer of each quantised format on each device: its product, and its expanded weight."""

import torch
import torch.nn.functional as F

from parallel_backend.checkpoints.packed_formats import FP8_KINDS, Fp8, Packing
from parallel_backend.checkpoints.quantised_formats import Layer, Quantised, blank
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.rank.stage.linear import RankLinear
from parallel_backend.rank.stage.quantised_products import PRODUCT_FAILS

from .findings import Findings
from .session import SelfTestSession
from .tiny_model import relative

ROWS, COLUMNS, TOKENS = 384, 512, 40
LAYERS = (
    Layer("int8_tensorwise"),
    Layer("int8_tensorwise", rotation=256),
    Layer("nvfp4", block=16),
    Layer("mxfp8", block=32),
    Layer("convrot_w4a4", rotation=256, block=64),
    Layer("asym_w4a8_int8", rotation=256, block=16),
    Layer("w6a8_int8", rotation=256, block=16, row=COLUMNS),
    Layer("awq_w4a16", block=64),
)
FP8 = "fp8_e4m3fn"
EXPANDED = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The most relative error of a product with an expanded weight, by compute dtype."""
ROUNDED = {
    "int8_tensorwise": 0.03,
    "asym_w4a8_int8": 0.03,
    "w6a8_int8": 0.03,
    FP8: 0.08,
    "mxfp8": 0.08,
    "nvfp4": 0.25,
    "convrot_w4a4": 0.25,
}
MULTIPLIED = ROUNDED | {"awq_w4a16": EXPANDED[torch.bfloat16]}
"""The same where the layer's input is rounded to the format: about twice the error of that rounding. awq_w4a16's input is
rounded to its scales' dtype, which is bf16 here."""


def look_at_quantised(session: SelfTestSession, findings: Findings) -> None:
    """In this process; on GPUs in half precision, the compute dtype of these formats there."""
    half = session.settings.half if session.settings.on_gpus else None
    dtype = TORCH_DTYPES[half or "fp32"]
    for device in dict.fromkeys(session.settings.devices):
        for layer in (None, *LAYERS):
            packed, packing = weight_of(layer)
            kind = FP8 if layer is None else layer.format
            name = f"{kind}{', rotated' if layer and layer.rotation else ''} on {device}"
            session.poll()
            _look_at_one(findings, name, packed, packing, torch.device(device), dtype, MULTIPLIED[kind])


def _look_at_one(
    findings: Findings,
    name: str,
    packed: torch.Tensor,
    packing: Packing,
    device: torch.device,
    dtype: torch.dtype,
    multiplied_limit: float,
) -> None:
    expanded = packing.expand(packed, torch.float32)
    x = torch.randn(2, TOKENS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = packed.to(device)
    packing = packing.on({key: tensor.to(device) for key, tensor in packing.tensors.items()})
    difference = relative(packing.expand(packed, torch.float32).cpu(), expanded)
    findings.at_most(f"{name}: its weight from a CPU's", difference, 1e-6)
    layer = RankLinear(COLUMNS, ROWS, bias=False, device="meta")
    layer.adapters = []
    layer.pack(packed, packing, dtype)
    multiplied = layer.arithmetic.weight is not None and layer.arithmetic.weight.multiplies
    error = relative(layer(x.to(device)).double().cpu(), F.linear(x.double(), expanded.double()))
    limit = multiplied_limit if multiplied else EXPANDED[dtype]
    findings.at_most(f"{name}: its product from the expanded weight's", error, limit)
    findings.note(f"{name}: how", layer.arithmetic.word)
    findings.expect(PRODUCT_FAILS not in layer.arithmetic.word, f"{name}: {layer.arithmetic.word}")


def weight_of(layer: Layer | None) -> tuple[torch.Tensor, Packing]:
    """A weight [ROWS, COLUMNS] on the CPU, of random values and scales from a fixed seed. None: scaled fp8."""
    g = torch.Generator().manual_seed(0)
    if layer is None or layer.format == "mxfp8":
        values = torch.randn(ROWS, COLUMNS, generator=g).to(FP8_KINDS[FP8]).view(torch.uint8)
    else:
        values = torch.randint(0, 256, (ROWS, COLUMNS * layer.bits // 8), dtype=torch.uint8, generator=g)
    if layer is None:
        return values, Fp8(FP8, torch.full((1, 1), 0.02))
    scales = {}
    for name, ones in blank(layer, ROWS, COLUMNS, torch.device("cpu"))[1].scales.items():
        spread = torch.rand(ones.shape, generator=g) + 0.5
        if ones.dtype != torch.uint8:  # block scales keep products in int8's range; row scales are small
            scales[name] = ((8 if ones.dtype.itemsize == 1 else 0.01) * spread).to(ones.dtype)
        elif layer.format == "mxfp8":  # exponents
            scales[name] = (118 + 6 * spread).to(torch.uint8)
        else:
            scales[name] = spread.to(torch.float8_e4m3fn).view(torch.uint8)
    return values, Quantised(layer, scales)
