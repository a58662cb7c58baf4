"""Attention kernels that other nodes, or a model's file, have chosen for a MODEL, by name for the ranks.

Such a node puts a function into transformer_options, which the native model calls in place of ComfyUI's attention. It cannot
run on the ranks. A function whose name is known becomes the name of the same kernel (BlockChanges.attention).
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from parallel_backend.checkpoints.checkpoint import Checkpoint
from parallel_backend.core.attention_kernels import AUTO, KERNELS, SAGE_VARIANTS, SDPA, wanted

from ...ui.other_nodes import name_of

CORE = re.compile(r"model_patcher\.ModelPatcher\.set_model_optimized_attention\.<locals>\.optimized_attention_override")
"""The function that ModelPatcher puts there for nodes such as Model Attention Backend."""
SAGE_KJ = re.compile(r"model_optimization_nodes\.PathchSageAttentionKJ\.patch\.<locals>\.attention_override_sage")
"""The function of KJNodes' Patch Sage Attention."""
FLASH_KJ = re.compile(r"model_optimization_nodes\.PatchFlashAttentionKJ\.patch\.<locals>\.attention_override_flash")
"""The function of KJNodes' Patch Flash Attention."""
NATIVE = {
    "attention_pytorch": SDPA,
    "attention_split": SDPA,
    "attention_sub_quad": SDPA,
    "attention_xformers": "xformers",
    "attention_flash": "flash",
    "attention_sage": "sage",
    "attention_comfy_kitchen_int8": "comfy_kitchen",
}
"""ComfyUI's attention functions -> the ranks' kernels, which differ from them only by rounding."""


def chosen_attention(override: Any, loaded: str) -> str | None:
    """Return `BlockChanges.attention` for an override of ComfyUI's attention. None: the kernel is unknown. `loaded`: the
    `attention` with which the ranks' model was loaded. If both kernels are exact, it is kept and the result is empty."""
    kernel = _kernel(override)
    if kernel is None:
        return None
    exact = KERNELS[kernel.partition(".")[0]].exact
    return "" if exact and wanted(loaded)[0].exact else kernel


def preferred_attention(checkpoint: Checkpoint, loaded: str) -> str:
    """`BlockChanges.attention` that the model's file asks for. Empty if there is none, if blocks differ, or if the user's
    widget `attention` (`loaded`) names a kernel."""
    kernels = set(checkpoint.attention.values())
    in_all = len(checkpoint.attention) >= len(checkpoint.built.own.blocks)
    free = loaded.partition("/")[0] == AUTO
    return kernels.pop() if free and in_all and len(kernels) == 1 else ""


def _kernel(override: Any) -> str | None:
    if not callable(override):
        return None
    name = name_of(override)
    if CORE.fullmatch(name):
        return NATIVE.get(getattr(_inside(override).get("optimized_attention"), "__name__", ""))
    if FLASH_KJ.fullmatch(name):
        return "flash"
    if SAGE_KJ.fullmatch(name):
        return _sage(override)
    return None


def _sage(override: Callable[..., Any]) -> str | None:
    """Return the kernel of KJNodes' function, by the function of the package that it calls and the number formats that it
    asks for."""
    for function in _functions(override):
        called, texts = _inside(function), function.__code__.co_consts
        for variant, (name, options) in SAGE_VARIANTS.items():
            if name in called and all(value in texts for value in options.values()):
                return f"sage.{variant}"
        if "sageattn" in called:
            return "sage"
    return None


def _functions(override: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The function, the functions in its closure, and those that decorators wrap."""
    pending, seen = [override], set()
    while pending:
        function = inspect.unwrap(pending.pop())
        function = getattr(function, "_torchdynamo_orig_callable", function)
        if inspect.isfunction(function) and function not in seen:
            seen.add(function)
            yield function
            pending += [value for value in _inside(function).values() if callable(value)]


def _inside(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of a function's closure."""
    return dict(inspect.getclosurevars(function).nonlocals)
