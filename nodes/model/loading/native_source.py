"""Where a native MODEL's weights come from: the file and the options that the loader has noted on the MODEL."""

import inspect
from dataclasses import dataclass
from pathlib import Path

import comfy.model_patcher
import torch

from parallel_backend.checkpoints.tensor_files import GGUF

from ...ui.other_nodes import name_of

LOADERS = {
    "sd.load_diffusion_model": "unet_path",
    "sd.load_checkpoint_guess_config": "ckpt_path",
    "model_optimization_nodes._load_diffusion_model_kj": "unet_path",
}
"""`name_of` functions of ComfyUI and KJNodes that load a MODEL -> their argument for the file."""
WITHOUT_MEANING = ("load_device", "offload_device", "fp8_optimizations")
"""Options that mean nothing to ranks: ComfyUI's devices, and fp8 products, which ranks always compute if the GPU can."""
DTYPES = {
    None: "default",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3fn",
}
INSTEAD = "Replace its loader by Parallel DiT Loader, or by Parallel Checkpoint Loader for an all-in-one file."


@dataclass(frozen=True)
class NativeSource:
    """A file of weights, and the `weight_dtype` of Parallel DiT Loader that stands for the native loader's choice."""

    path: Path
    weight_dtype: str


def native_source(model: comfy.model_patcher.ModelPatcher, named: Path | None = None) -> NativeSource:
    """The source of a native MODEL. ValueError, with advice, if it is unknown or not the contents of a single file.

    `named`: the model file that the MODEL's loader has in the prompt's graph. Loaders of GGUF files note none on the MODEL.
    """
    noted = model.cached_patcher_init
    if noted is None and named is not None and named.suffix.lower() in GGUF:
        return NativeSource(named, DTYPES.get(model.object_patches.get("manual_cast_dtype"), "default"))
    if noted is None:
        raise ValueError(f"model: this MODEL's file is unknown: its loader does not name it. {INSTEAD}")
    function, arguments = noted[:2]
    if (path_name := LOADERS.get(name := name_of(function))) is None:
        raise ValueError(f"model: this MODEL is made by {name}, which this pack does not know. {INSTEAD}")
    call = inspect.signature(function).bind(*arguments).arguments
    if call.get("extra_state_dict") is not None:
        raise ValueError(f"model: its loader adds weights of a second file ({call['extra_state_dict']}). {INSTEAD}")
    options = {key: value for key, value in (call.get("model_options") or {}).items() if value is not None}
    dtype = options.pop("dtype", None)
    if dtype not in DTYPES:
        raise ValueError(
            f"model: its loader keeps weights in {str(dtype).removeprefix('torch.')}, which ranks do not. Choose "
            "fp8_e4m3fn or default there."
        )
    if others := [key for key in options if key not in WITHOUT_MEANING]:
        raise ValueError(f"model: its loader has {', '.join(others)}, which ranks do not have. {INSTEAD}")
    compute = model.object_patches.get("manual_cast_dtype")  # KJNodes' loaders and Select Model Device set it
    if compute in DTYPES and dtype != torch.float8_e4m3fn:
        dtype = compute or dtype
    return NativeSource(Path(call[path_name]), DTYPES[dtype])
