"""Attention that a model's file asks for, layer by layer, as ComfyUI from 0.37 on reads it.

Beside an attention layer's weights such a file, or a LoRA, has a tensor `<layer>.comfy_attention.config` of JSON bytes: an
object, or a list of objects of which the first that can run counts. Its `attention` names the method (`ComfyAttention` in
ComfyUI's comfy/ldm/modules/attention.py). A method that is not known is left out, there as here.
"""

from collections.abc import Mapping
from typing import Any

from parallel_backend.core.short_text import short

from .tensor_files import GGUF, Entry, read_json

PREFERENCE = ".comfy_attention.config"
KERNELS = {"comfy_kitchen_int8": "comfy_kitchen"}
"""ComfyUI's methods -> kernels of ranks (core/attention_kernels.py)."""


def take_preferences(name: str, entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], dict[str, str]]:
    """(`entries` of file `name` without preferences, attention layer -> the kernel that the file asks for).

    Layers whose methods are all unknown are left out. ValueError for a preference that is neither an object nor a list of
    objects.
    """
    rest = {key: entry for key, entry in entries.items() if not key.endswith(PREFERENCE)}
    asked = {
        key.removesuffix(PREFERENCE): entry
        for key, entry in entries.items()
        if key not in rest and entry.file.suffix.lower() not in GGUF
    }
    kernels = {layer: asked_kernel(f"model_name: {name}", layer, wishes) for layer, wishes in read_json(asked).items()}
    return rest, {layer: kernel for layer, kernel in kernels.items() if kernel}


def asked_kernel(asker: str, layer: str, wishes: Any) -> str:
    """The kernel of ranks that `wishes`, read from JSON, ask for in a layer. Empty: all methods are unknown.

    ValueError, which begins with `asker`, unless they are an object or a list of objects.
    """
    methods = [_method(asker, layer, wish) for wish in (wishes if isinstance(wishes, list) else [wishes])]
    return next((KERNELS[method] for method in methods if method in KERNELS), "")


def _method(asker: str, layer: str, wish: Any) -> str:
    if not isinstance(wish, dict):
        raise ValueError(
            f"{asker} has an attention setting for {short(layer)} in an unknown form: {short(wish)}. The file is "
            "damaged. Use another copy."
        )
    method = wish.get("attention")
    return method if isinstance(method, str) else ""
