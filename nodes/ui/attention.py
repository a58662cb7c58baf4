"""The widget `attention`: `auto` is the kernel that ComfyUI itself computes attention with."""

import logging

from comfy.cli_args import args
from comfy.ldm.modules import attention as native

from parallel_backend.core.attention_kernels import AUTO, KERNELS, SDPA, as_wish, known_devices
from parallel_backend.core.validate import check_attention

log = logging.getLogger(__name__)

OURS = {
    "pytorch": SDPA,
    "flash": "flash",
    "sage": "sage",
    "xformers": "xformers",
    "comfy_kitchen_int8": "comfy_kitchen",
}
"""Our kernels by ComfyUI's names (register_attention_function)."""
FLAGS = {"use_split_cross_attention": "split", "use_quad_cross_attention": "sub_quad"}
"""Start flags whose kernels save memory that ranks do not lack, by ComfyUI's name of the kernel."""


def attention_for(widget: str, devices: tuple[str, ...], dtype: str) -> str:
    """The `attention` that ranks are loaded with. ValueError for a kernel that cannot run on them.

    For `auto` what ComfyUI was started with. If the ranks cannot have that, the log says so.
    """
    check_attention(widget, devices, dtype)
    if widget != AUTO:
        return widget
    name = _native_name()
    kernel = OURS.get(name)
    if kernel is None:
        # Without a flag these are what ComfyUI falls back on, on a CPU for instance: nothing that anybody chose.
        if name not in FLAGS.values() or any(getattr(args, flag, False) for flag in FLAGS):
            log.warning("Parallel DiT: the ranks do not have ComfyUI's attention '%s': they take torch's SDPA", name)
        return AUTO
    found = KERNELS[kernel]
    if not all(found.possible(device, dtype) for device in known_devices(devices)):
        log.warning(
            "Parallel DiT: ComfyUI computes attention by %s, but ranks take torch's SDPA: %s (these are %s with %s)",
            found.title,
            found.needs,
            ", ".join(devices),
            dtype,
        )
        return AUTO
    return as_wish(kernel)


def _native_name() -> str:
    """ComfyUI's name of the function that its models call; that function's own, where ComfyUI does not know it."""
    used = native.optimized_attention
    registered = native.REGISTERED_ATTENTION_FUNCTIONS
    return next((name for name, function in registered.items() if function is used), used.__name__)
