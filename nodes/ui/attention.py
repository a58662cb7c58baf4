"""The widget `attention`: `auto` is the kernel with which ComfyUI computes attention."""

import logging

from comfy.cli_args import args
from comfy.ldm.modules import attention as native

from parallel_backend.core.attention_kernels import AUTO, KERNELS, SDPA, as_wish, known_devices
from parallel_backend.core.validate import check_attention

log = logging.getLogger(__name__)

OURS = {"pytorch": SDPA, "flash": "flash", "sage": "sage", "xformers": "xformers", "comfy_kitchen_int8": "comfy_kitchen"}
"""ComfyUI's name of an attention kernel (register_attention_function) -> the name that ranks use."""
FLAGS = {"use_split_cross_attention": "split", "use_quad_cross_attention": "sub_quad"}
"""Start flag of ComfyUI -> its name of the flag's kernel. Ranks do not have these kernels, which save memory."""


def attention_for(widget: str, devices: tuple[str, ...], dtype: str) -> str:
    """Return the `attention` that ranks are loaded with. Raises ValueError for a kernel that cannot run on these devices.

    `auto` is the kernel that ComfyUI was started with. If ranks cannot run that kernel, they use torch's, and the log says
    so.
    """
    check_attention(widget, devices, dtype)
    if widget != AUTO:
        return widget
    name = _native_name()
    kernel = OURS.get(name)
    if kernel is None:
        # Without a flag, ComfyUI has fallen back on such a kernel, on a CPU for instance, and the user need not be told.
        if name not in FLAGS.values() or any(getattr(args, flag, False) for flag in FLAGS):
            log.warning("Parallel DiT: the ranks do not have ComfyUI's attention '%s' and use torch's SDPA", name)
        return AUTO
    wanted = KERNELS[kernel]
    if not all(wanted.possible(device, dtype) for device in known_devices(devices)):
        log.warning(
            "Parallel DiT: ComfyUI computes attention by %s, but ranks use torch's SDPA: %s (these are %s with %s)",
            wanted.title,
            wanted.needs,
            ", ".join(devices),
            dtype,
        )
        return AUTO
    return as_wish(kernel)


def _native_name() -> str:
    """Return ComfyUI's name of the attention function that its models call, or the function's own name if it is not
    registered."""
    used = native.optimized_attention
    registered = native.REGISTERED_ATTENTION_FUNCTIONS
    return next((name for name, function in registered.items() if function is used), used.__name__)
