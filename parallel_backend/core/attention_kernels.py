"""The attention kernels that a rank may have, as data: a row of KERNELS for each module in rank/attention/kernels.

The widget `attention` lists them, and what cannot run is refused before ranks start. `auto` is ComfyUI's own choice: the
nodes write it as `auto/sage`, which is a wish. A kernel's name alone is a demand. `auto` alone is torch's SDPA.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .devices import device_kind, on_ray
from .dtypes import HALVES, compute_name

AUTO, SDPA = "auto", "sdpa"
FLASH_CAPABILITY = (8, 0)
"""Compute capability that FlashAttention 2 needs, also torch's own: Ampere."""


@dataclass(frozen=True)
class AttentionKernel:
    """What is known of a kernel before it is tried."""

    name: str
    """The widget's word, and the module in rank/attention/kernels."""
    title: str
    """In reports, logs and errors."""
    package: str = ""
    """The module that has to be installed. Empty: none."""
    capability: tuple[int, int] = (0, 0)
    """Least compute capability of NVIDIA's GPUs."""
    dtypes: tuple[str, ...] = HALVES
    """What queries may be in."""
    masks: bool = False
    """It takes key masks. Calls with a mask go to SDPA otherwise."""
    exact: bool = True
    """False: queries and keys are quantised."""

    def possible(self, device: str, dtype: str) -> bool:
        """Whether it may run on `device` with weights of `dtype`: a trial on a rank has the last word."""
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
        """In words: what has to be there."""
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
        AttentionKernel("sage", "SageAttention", "sageattention", (7, 5), exact=False),
        AttentionKernel(
            "comfy_kitchen",
            "comfy-kitchen's int8 attention",
            "comfy_kitchen",
            (7, 5),
            ("fp32", *HALVES),
            masks=True,
            exact=False,
        ),
        AttentionKernel("xformers", "xformers", "xformers", (6, 0), ("fp32", *HALVES)),
    )
}
"""By name, in the widget's order."""

ATTENTION = (AUTO, *KERNELS)
"""Words of the widget `attention`."""


def as_wish(kernel: str) -> str:
    """The `attention` that prefers this kernel and does without it."""
    return AUTO if kernel == SDPA else f"{AUTO}/{kernel}"


def wanted(attention: str) -> tuple[AttentionKernel, bool]:
    """The kernel that `attention` names, and whether nothing else will do."""
    if attention == AUTO:
        return KERNELS[SDPA], False
    return KERNELS[attention.removeprefix(f"{AUTO}/")], attention in KERNELS


def known_devices(devices: Iterable[str]) -> list[str]:
    """Those that this machine can say something of: not the GPUs of a Ray cluster."""
    return [device for device in devices if not (on_ray(device) and device_kind(device) == "cuda")]
