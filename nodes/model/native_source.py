"""Where a native MODEL's weights come from: the file and the options that its loader has noted on it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_patcher
import torch

from ..ui.other_nodes import name_of

LOADERS = {
    "sd.load_diffusion_model": "unet_path",
    "sd.load_checkpoint_guess_config": "ckpt_path",
    "model_optimization_nodes._load_diffusion_model_kj": "unet_path",
}
"""Functions that a MODEL can be made again by, by `name_of` them -> their argument for the file. ComfyUI's own, and
KJNodes'."""
WITHOUT_MEANING = ("load_device", "offload_device", "fp8_optimizations")
"""Options about ComfyUI's own devices, and fp8 products, which ranks make where the GPU does."""
DTYPES = {
    None: "default",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3fn",
}
INSTEAD = "Put Parallel DiT Loader in place of the node that loads it, or Parallel Checkpoint Loader for an all-in-one file."


@dataclass(frozen=True)
class NativeSource:
    """A file of weights, and Parallel DiT Loader's `weight_dtype` for what the native loader made of it."""

    path: Path
    weight_dtype: str


def loaders_say_it() -> bool:
    """This ComfyUI's loaders note their file on the MODEL."""
    return "cached_patcher_init" in comfy.model_patcher.ModelPatcher.__init__.__code__.co_names


def native_source(model: comfy.model_patcher.ModelPatcher) -> NativeSource:
    """The source of a native MODEL. ValueError, saying what to do, where it is not known or not a file as it is."""
    noted = getattr(model, "cached_patcher_init", None)  # since 2026
    if noted is None:
        raise ValueError(f"model: which file this MODEL is from is not known: its loader does not say it. {INSTEAD}")
    function, arguments = noted[:2]
    if (path_name := LOADERS.get(name := name_of(function))) is None:
        raise ValueError(f"model: this MODEL is made by {name}, which is not known here. {INSTEAD}")
    given = _given(function, arguments)
    if given.get("extra_state_dict") is not None:
        raise ValueError(f"model: its loader adds weights of a second file ({given['extra_state_dict']}). {INSTEAD}")
    options = {key: value for key, value in (given.get("model_options") or {}).items() if value is not None}
    dtype = options.pop("dtype", None)
    if dtype not in DTYPES:
        raise ValueError(
            f"model: its loader keeps weights in {str(dtype).removeprefix('torch.')}, which ranks do not. Choose "
            "fp8_e4m3fn or default there."
        )
    if others := [key for key in options if key not in WITHOUT_MEANING]:
        raise ValueError(f"model: its loader has {', '.join(others)}, which ranks do not have. {INSTEAD}")
    compute = model.object_patches.get("manual_cast_dtype")  # as KJNodes' loaders set it, and Select Model Device
    if compute in DTYPES and dtype != torch.float8_e4m3fn:
        dtype = compute or dtype
    return NativeSource(Path(given[path_name]), DTYPES[dtype])


def _given(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    return inspect.signature(function).bind(*arguments).arguments
