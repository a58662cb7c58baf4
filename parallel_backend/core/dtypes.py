"""Dtypes of weights by name. A name is the dtype in which weights are stored, such as `bf16`. `bf16/fp32` are stored in bf16
and computed in fp32. `fp8_e4m3fn` and `int8` alone are computed in bf16 on GPUs and in fp32 on CPUs."""

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
"""Dtypes in which weights are stored but never computed."""
HALVES = ("bf16", "fp16")
"""Dtypes with 16 bits, in which GPUs compute fastest."""

BF16_CAPABILITY = (8, 0)
"""CUDA devices from Ampere on compute bf16 in hardware. Older ones emulate bf16, slowly."""
FP16_CAPABILITY = (7, 0)
"""CUDA devices from Volta on compute faster in fp16 than in fp32."""
NO_FP16 = ("GTX 16", "T500", "T550", "T600", "T1000", "T1200", "T2000", "MX450", "MX550", "CMP 30HX")
"""Parts of the names of small Turing chips, whose fp16 results are wrong (ComfyUI, should_use_fp16)."""
NO_BF16_ARCHITECTURES = ("gfx8", "gfx900", "gfx906", "gfx101", "gfx103")
"""AMD architectures up to RDNA 2 (ComfyUI, should_use_bf16)."""


def storage_name(name: str) -> str:
    """Return the dtype in which weights are stored."""
    return name.partition("/")[0]


def compute_name(name: str, kind: str = "cuda") -> str:
    """Return the dtype in which weights are computed on devices of this kind, cuda or cpu."""
    storage, _, compute = name.partition("/")
    if compute:
        return compute
    if storage in STORED_ONLY:
        return "bf16" if kind == "cuda" else "fp32"
    return storage


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype in which weights of dtype `name` are computed on `device`."""
    return TORCH_DTYPES[compute_name(name, device.type)]


def native_halves(device: str) -> tuple[str, ...]:
    """Return the dtypes of HALVES in which the GPU `device`, such as cuda:0, computes. For a GPU of a Ray cluster it returns
    both. The nodes ask ComfyUI instead, because ComfyUI's options can change them."""
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
    name: str, stored: str, devices: Sequence[str], allowed: Sequence[str] = HALVES, native: Collection[str] | None = None
) -> str:
    """Return the dtype for weight_dtype `name`, the same on all devices.

    `default` is fp32 on CPU ranks. On GPUs it is the file's dtype `stored`, or fp32 if `stored` is not in TORCH_DTYPES. If
    the GPUs do not compute in that dtype, they compute in the first dtype of `allowed` (OwnClass.halves) that they support.
    If there is none, they compute in fp32 with the weights stored unchanged, as in ComfyUI. An explicit `name` need not be
    in `allowed`. `native`: the dtypes of HALVES in which all GPUs compute. None: torch is asked.
    """
    on_gpus = [device for device in devices if device_kind(device) == "cuda"]
    if not on_gpus:
        return "fp32" if name == "default" else name
    if len(on_gpus) < len(devices):  # CPU ranks and GPU ranks must compute in one dtype
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
        return compute  # as large as `storage`, and converted only once, at loading
    return storage if compute == compute_name(storage) else f"{storage}/{compute}"
