"""The attention kernels that ranks can use: a row of KERNELS for each module in rank/attention/kernels.

The widget `attention` lists the kernels. A kernel's name alone is a demand: an error is raised before ranks start if it
cannot run. `auto/sage` is a preference: if the widget is `auto`, the nodes add the name of ComfyUI's kernel. `auto` alone
means torch's SDPA.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .devices import device_kind, on_ray
from .dtypes import HALVES, compute_name

AUTO, SDPA = "auto", "sdpa"
FLASH_CAPABILITY = (8, 0)
"""Compute capability that FlashAttention 2 needs: Ampere."""


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel and its requirements."""

    name: str
    """The value of the widget, and the module in rank/attention/kernels."""
    title: str
    """The name in reports, logs and errors."""
    package: str = ""
    """The Python module that must be installed. Empty: none."""
    capability: tuple[int, int] = (0, 0)
    """The lowest compute capability of an NVIDIA GPU."""
    dtypes: tuple[str, ...] = HALVES
    """Dtypes of weights with which it can compute."""
    masks: bool = False
    """Whether the kernel takes key masks. False: calls with a mask go to SDPA."""
    exact: bool = True
    """Whether the kernel is exact. False: it quantizes queries and keys."""
    lse: bool = True
    """Whether the kernel returns the log-sum-exp. False: calls that need it go to SDPA."""
    graphs: bool = True
    """Whether the kernel is launched on torch's current stream, so that a CUDA graph captures it."""

    def possible(self, device: str, dtype: str) -> bool:
        """Whether the kernel meets its requirements on `device` with weights of `dtype`. The rank then tries it."""
        if self.name == SDPA:
            return True
        return (
            device_kind(device) == "cuda"
            and compute_name(dtype) in self.dtypes
            and bool(importlib.util.find_spec(self.package))
            and torch.cuda.get_device_capability(device) >= self.capability
        )

    @property
    def needs(self) -> str:
        """The requirements as a clause of an error."""
        least = ".".join(map(str, self.capability))
        return (
            f"it needs the package {self.package}, and CUDA devices of compute capability {least} or more with "
            f"{' or '.join(self.dtypes)} weights"
        )


KERNELS = {
    kernel.name: kernel
    for kernel in (
        AttentionKernel(SDPA, "torch SDPA", dtypes=("fp32", *HALVES), masks=True),
        AttentionKernel("flash", "flash-attn", "flash_attn", FLASH_CAPABILITY),
        AttentionKernel("flash3", "FlashAttention 3", "flash_attn_interface", FLASH_CAPABILITY),
        # Release 2 launches its CUDA kernels on the default stream (its pull requests 371 and 380): they run during the
        # capture and are not in the graph, whose replays then read what they left.
        AttentionKernel("sage", "SageAttention", "sageattention", (7, 5), exact=False, graphs=False),
        AttentionKernel(
            "comfy_kitchen",
            "comfy-kitchen's int8 attention",
            "comfy_kitchen",
            (7, 5),
            ("fp32", *HALVES),
            masks=True,
            exact=False,
            lse=False,
        ),
        AttentionKernel("xformers", "xformers", "xformers", (6, 0), ("fp32", *HALVES)),
    )
}
"""Kernels by name, in the widget's order."""

SAGE_VARIANTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "fp16_cuda": ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    "fp16_triton": ("sageattn_qk_int8_pv_fp16_triton", {}),
    "fp8_cuda": ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32"}),
    "fp8_cuda++": ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp16"}),
}
"""Kernels of SageAttention 2 that a node may choose -> function of the package and its options. Otherwise the package
chooses by the GPU."""

ATTENTION = (AUTO, *KERNELS)
"""Values of the widget `attention`."""


def as_wish(kernel: str) -> str:
    """Return the value of `attention` that prefers this kernel and falls back to SDPA."""
    return AUTO if kernel == SDPA else f"{AUTO}/{kernel}"


def wanted(attention: str) -> tuple[AttentionKernel, bool]:
    """Return (the kernel that `attention` names, whether it is demanded, without a fallback)."""
    if attention == AUTO:
        return KERNELS[SDPA], False
    return KERNELS[attention.removeprefix(f"{AUTO}/").partition(".")[0]], attention in KERNELS


def variant_of(attention: str) -> str:
    """Return the key of SAGE_VARIANTS in `attention`, or empty."""
    return attention.partition(".")[2]


def known_devices(devices: Iterable[str]) -> list[str]:
    """Return the devices whose properties this process can read: all but the GPUs of a Ray cluster."""
    return [device for device in devices if not (on_ray(device) and device_kind(device) == "cuda")]
