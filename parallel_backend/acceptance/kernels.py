"""Checks of a device's kernels: attention with its log-sum-exp against fp64, and products with quantised weights."""

import torch
import torch.nn.functional as F

from parallel_backend.checkpoints.packed_formats import FP8_KINDS, Fp8, Packing
from parallel_backend.checkpoints.quantised_formats import Layer, Quantised, blank
from parallel_backend.core.attention_kernels import KERNELS, SDPA, AttentionKernel
from parallel_backend.core.dtypes import TORCH_DTYPES
from parallel_backend.rank.attention.kernel_choice import RankKernel
from parallel_backend.rank.stage.linear import RankLinear
from parallel_backend.rank.stage.quantised_products import PRODUCT_FAILS

from .session import Findings, SelfTestSession
from .tiny_model import relative

LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
"""Largest allowed relative error of attention against fp64, by dtype."""
QUANTISED_LIMIT = 0.1
"""The same for kernels that quantise queries and keys: an estimate, not yet measured on a GPU."""
HEAD_SIZES = (16, 64, 128)
QUERIES, KEYS = 13, 55
"""A band's queries and the image's keys; no multiples of any kernel's tile."""
MASKS = {"all keys": None, "some keys": (20, 55), "no key in one entry": (0, 31)}
"""How many of the keys each of the two batch entries may see."""

ROWS, COLUMNS, TOKENS = 384, 512, 40
"""Sizes of a quantised weight, and the number of tokens of its layer's input."""
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
"""Largest allowed relative error of a product with an expanded weight, by compute dtype."""
MULTIPLIED = {
    "int8_tensorwise": 0.03,
    "asym_w4a8_int8": 0.03,
    "w6a8_int8": 0.03,
    FP8: 0.08,
    "mxfp8": 0.08,
    "nvfp4": 0.25,
    "convrot_w4a4": 0.25,
    "awq_w4a16": EXPANDED[torch.bfloat16],
}
"""The same where the layer's input is rounded to the format: about twice the error of that rounding. awq_w4a16's input is
rounded to its scales' dtype, which is bf16 here."""


def look_at_attention(session: SelfTestSession, findings: Findings) -> None:
    """On each different device, in this process."""
    absent = {name: "not installed, or it cannot serve these devices" for name in KERNELS}
    for device in dict.fromkeys(session.settings.devices):
        for dtype, limit in LIMITS.items():
            name = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
            for kernel in KERNELS.values():
                error = _worst(kernel, device, dtype)
                if error is not None:
                    absent.pop(kernel.name, None)
                    title = "attention" if kernel.name == SDPA else kernel.title
                    findings.at_most(f"{title}, {name} on {device}", error, limit if kernel.exact else QUANTISED_LIMIT)
                    session.poll()
                elif kernel.name in absent and kernel.possible(device, dtype):
                    reason = RankKernel(kernel, torch.device(device)).failure(HEAD_SIZES[-1], TORCH_DTYPES[dtype])
                    absent[kernel.name] = f"its trial on {device} failed: {reason}"
    for kernel_name, reason in absent.items():
        findings.leave_out(KERNELS[kernel_name].title, reason)


def heads(device: str, dtype: torch.dtype, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [2, QUERIES, 8, size], keys and values [2, KEYS, 8, size], with the strides that an all-to-all leaves."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(KEYS, 3, 2, 8, size, generator=g).to(device, dtype)
    q, k, v = (rows[:, i].transpose(0, 1) for i in range(3))
    return q[:, :QUERIES], k, v


def in_fp64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's output [2, QUERIES, 8, size] and log-sum-exp [2, QUERIES, 8], float64 on the CPU."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.cpu()[:, None, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # without any key softmax gives NaN, and the output is 0
    return torch.einsum("bqhk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


def _worst(kernel: AttentionKernel, device: str, dtype_name: str) -> float | None:
    """The largest error over head sizes and masks: of the output, relative, and of the log-sum-exp, over 1 + its size.

    Only calls for which ranks use this kernel are made. None if there are no such calls on this device.
    """
    if not kernel.possible(device, dtype_name):
        return None
    dtype, taken, errors = TORCH_DTYPES[dtype_name], RankKernel(kernel, torch.device(device)), []
    for size in HEAD_SIZES:
        with_lse = taken.failure(size, dtype, lse=True) is None
        if kernel.name != SDPA and not with_lse and taken.failure(size, dtype) is not None:
            continue
        q, k, v = heads(device, dtype, size)
        for seen in MASKS.values() if kernel.masks else (None,):
            mask = None if seen is None else (torch.arange(KEYS)[None] < torch.tensor(seen)[:, None]).to(device)
            expected, expected_lse = in_fp64(q, k, v, mask)
            if with_lse or kernel.name == SDPA:
                out, lse = taken.attend_lse(q, k, v, mask, None)
                errors.append(relative(out.double().cpu(), expected))
                known = expected_lse.isfinite()
                if not torch.equal(lse.cpu().isfinite(), known):
                    return float("inf")
                apart = (lse.double().cpu() - expected_lse)[known].abs() / (1 + expected_lse[known].abs())
                errors.append(apart.max().item())
            if 0 not in (seen or ()):  # without any key `attend` may return anything, `attend_lse` returns 0
                errors.append(relative(taken.attend(q, k, v, mask, None).double().cpu(), expected))
    return max(errors, default=None)


def look_at_quantised(session: SelfTestSession, findings: Findings) -> None:
    """One layer of each format in this process: its product, and its expanded weight. On GPUs in half precision, the compute
    dtype of these formats there."""
    half = session.settings.half if session.settings.on_gpus else None
    dtype = TORCH_DTYPES[half or "fp32"]
    for device in dict.fromkeys(session.settings.devices):
        for layer in (None, *LAYERS):
            session.poll()
            _look_at_layer(findings, layer, torch.device(device), dtype)


def _look_at_layer(findings: Findings, layer: Layer | None, device: torch.device, dtype: torch.dtype) -> None:
    """`layer` None: scaled fp8."""
    kind = FP8 if layer is None else layer.format
    name = f"{kind}{', rotated' if layer and layer.rotation else ''} on {device}"
    packed, packing = weight_of(layer)
    expanded = packing.expand(packed, torch.float32)
    x = torch.randn(2, TOKENS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = packed.to(device)
    packing = packing.on({key: tensor.to(device) for key, tensor in packing.tensors.items()})
    difference = relative(packing.expand(packed, torch.float32).cpu(), expanded)
    findings.at_most(f"{name}: its weight from a CPU's", difference, 1e-6)
    linear = RankLinear(COLUMNS, ROWS, bias=False, device="meta")
    linear.adapters = []
    linear.pack(packed, packing, dtype)
    multiplied = linear.arithmetic.weight is not None and linear.arithmetic.weight.multiplies
    error = relative(linear(x.to(device)).double().cpu(), F.linear(x.double(), expanded.double()))
    limit = MULTIPLIED[kind] if multiplied else EXPANDED[dtype]
    findings.at_most(f"{name}: its product from the expanded weight's", error, limit)
    findings.note(f"{name}: how", linear.arithmetic.word)
    findings.expect(PRODUCT_FAILS not in linear.arithmetic.word, f"{name}: {linear.arithmetic.word}")


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
