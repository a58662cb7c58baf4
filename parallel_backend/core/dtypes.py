"""Dtypes of weights by name. The client needs them and must not import diffusers.

A name is that of the dtype in which weights are stored, such as `bf16`. If they are computed in another dtype, the name has
both: `bf16/fp32`. `fp8_e4m3fn` and `int8` alone are computed in bf16 on GPUs and in fp32 on CPUs.
"""

from collections.abc import Collection, Sequence

import torch

from .devices import device_kind, on_ray

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
}
STORED_ONLY = ("fp8_e4m3fn", "int8")
"""Names of dtypes that a model's input is never in."""
HALVES = ("bf16", "fp16")
"""What GPUs compute in fast, where they do at all."""

BF16_CAPABILITY = (8, 0)
"""CUDA devices from Ampere on compute in bf16. Older ones take it, and are slow in it."""
FP16_CAPABILITY = (7, 0)
"""CUDA devices from Volta on compute in fp16 faster than in fp32."""
NO_FP16 = ("GTX 16", "T500", "T550", "T600", "T1000", "T1200", "T2000", "MX450", "MX550", "CMP 30HX")
"""In the names of Turing's small chips, whose results in fp16 are not to be used (ComfyUI, should_use_fp16)."""
NO_BF16_ARCHITECTURES = ("gfx8", "gfx900", "gfx906", "gfx101", "gfx103")
"""AMD's, up to RDNA 2 (ComfyUI, should_use_bf16)."""


def storage_name(name: str) -> str:
    """The dtype in which weights are stored."""
    return name.partition("/")[0]


def compute_name(name: str, kind: str = "cuda") -> str:
    """The dtype in which weights are computed on devices of this kind, cuda or cpu."""
    storage, _, compute = name.partition("/")
    if compute:
        return compute
    if storage in STORED_ONLY:
        return "bf16" if kind == "cuda" else "fp32"
    return storage


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that weights of dtype `name` are computed in."""
    return TORCH_DTYPES[compute_name(name, device.type)]


def native_halves(device: str) -> tuple[str, ...]:
    """Those of HALVES that the GPU `device`, such as cuda:0, computes in. A GPU of a Ray cluster is not asked: both.

    The nodes ask ComfyUI instead, which knows what its user has set.
    """
    if on_ray(device):
        return HALVES
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return ("fp16",) if properties.gcnArchName.startswith(NO_BF16_ARCHITECTURES) else HALVES
    capability = properties.major, properties.minor
    if capability >= BF16_CAPABILITY:
        return HALVES
    broken = any(part in properties.name for part in NO_FP16)
    return ("fp16",) if capability >= FP16_CAPABILITY and not broken else ()


def resolve_dtype(
    name: str,
    stored: str,
    devices: Sequence[str],
    allowed: Sequence[str] = HALVES,
    native: Collection[str] | None = None,
) -> str:
    """The dtype that weight_dtype `name` stands for, the same on all devices.

    `default` is fp32 on CPU ranks, elsewhere the file's dtype `stored`, or fp32 if that is none of TORCH_DTYPES. If GPUs do
    not compute in a dtype, weights are computed in the first dtype of `allowed` that they do compute in, else in fp32 with
    the weights stored as they are: ComfyUI's rule. `allowed`: the family's half_dtypes. An explicit `name` may be another
    one. `native`: those of HALVES that all GPUs compute in. None: torch is asked.
    """
    on_gpus = [device for device in devices if device_kind(device) == "cuda"]
    if not on_gpus:
        return "fp32" if name == "default" else name
    if len(on_gpus) < len(devices):  # all ranks have to compute in the same
        return "fp32" if name in ("default", "fp32") else f"{name}/fp32" if name in STORED_ONLY else name
    storage = name if name != "default" else stored if stored in TORCH_DTYPES else "fp32"
    if storage == "fp32":
        return storage
    if native is None:
        native = [half for half in HALVES if all(half in native_halves(device) for device in on_gpus)]
    usable = [half for half in allowed if half in native]
    if storage in native and (name != "default" or storage in allowed):
        return storage
    compute = usable[0] if usable else "fp32"
    if storage in HALVES and compute in HALVES:
        return compute  # as large, and converted once
    return storage if compute == compute_name(storage) else f"{storage}/{compute}"
