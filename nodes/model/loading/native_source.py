"""A native MODEL that ranks replace: its file and its loader's options, whether nodes have rewritten it, and its memory."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import folder_paths
import torch

from parallel_backend.checkpoints.tensor_files import GGUF

from ...ui.other_nodes import definition, name_of

LOADERS = {
    "sd.load_diffusion_model": "unet_path",
    "sd.load_checkpoint_guess_config": "ckpt_path",
    "model_optimization_nodes._load_diffusion_model_kj": "unet_path",
}
"""Name of a loading function of ComfyUI or KJNodes, as from `name_of` -> its argument for the file."""
WITHOUT_MEANING = ("load_device", "offload_device", "fp8_optimizations")
"""Options without meaning for ranks: ComfyUI's devices, and fp8 products, which ranks always compute if the GPU can."""
DTYPES = {
    None: "default",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3fn",
}
INSTEAD = "Replace its loader by Parallel DiT Loader, or by Parallel Checkpoint Loader for an all-in-one file."
HALF = torch.bfloat16, torch.float16
"""Dtypes that convert to fp32 without loss."""
COMPARED = 4096
"""Number of values in the middle of each tensor that are compared with the file: one or two pages of the file."""


@dataclass(frozen=True)
class NativeSource:
    """A file of weights, and the `weight_dtype` of Parallel DiT Loader that corresponds to the native loader's choice."""

    path: Path
    weight_dtype: str


def native_source(model: comfy.model_patcher.ModelPatcher, named: Path | None = None) -> NativeSource:
    """The source of a native MODEL. Raises ValueError, with advice, if it is unknown or not the contents of a single file.

    `named`: the model file that the MODEL's loader has in the prompt's graph. Loaders of GGUF files store none on the MODEL.
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


def unload(model: comfy.model_patcher.ModelPatcher) -> None:
    """Unload the native model from its devices, if it was sampled before. ComfyUI then undoes patches in its weights."""
    loaded = [each.model for each in comfy.model_management.current_loaded_models]
    if any(patcher is not None and patcher.is_clone(model) for patcher in loaded):
        comfy.model_management.unload_model_and_clones(model, unload_additional_models=False)


def check_not_rewritten(model: comfy.model_patcher.ModelPatcher) -> None:
    """Raise ValueError for a module, forward or hook that a node has put into the native model: the file does not have
    it."""
    own_layers = getattr(model.model.model_config, "custom_operations", None)  # of the loader: ComfyUI-GGUF's
    for name, module in model.model.diffusion_model.named_modules():
        kind = type(module)
        change = ""
        if _of_a_pack(kind.__module__) and getattr(own_layers, kind.__name__, None) is not kind:
            change = f"{kind.__module__}.{kind.__qualname__}"
        elif getattr(module.forward, "__func__", module.forward) is not kind.forward:
            forward = definition(module.forward)
            change = f"{forward.__module__}.{forward.__qualname__}"
        elif module._forward_hooks or module._forward_pre_hooks:
            change = "a hook"
        if change:
            raise ValueError(
                f"model: a node has replaced '{name or 'forward'}' of ComfyUI's model by {change}, which cannot reach "
                "the ranks. Remove that node, or Parallelize Model."
            )


def _of_a_pack(module: str) -> bool:
    """Whether this module is in a folder of custom nodes."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(
        Path(file).is_relative_to(each) for each in folder_paths.get_folder_paths("custom_nodes")
    )


def give_back_memory(model: comfy.model_patcher.ModelPatcher, path: Path) -> None:
    """Replace the native model's copies of the file's weights with views of the mapped file, which need no memory.

    ComfyUI keeps the loader's output as long as the workflow is open. The MODEL can still be sampled without ranks:
    ComfyUI's layers then convert weights that the loader had converted to fp32 at each use. Weights that ComfyUI has rounded
    (to fp8) stay as copies. With ComfyUI's dynamic loading, and for GGUF files, all weights are views already. Raises
    ValueError for weights that differ from the file's, because a node has written to them.
    """
    if model.is_dynamic() or comfy.utils.DISABLE_MMAP or path.suffix.lower() in GGUF:
        return
    for name, weight, stored in _pairs(model, path):
        if not torch.equal(_bits(weight, weight.dtype), _bits(stored, weight.dtype)):
            raise ValueError(
                f"model: a node has changed the weights of ComfyUI's model ({name}). The ranks read {path.name}, which "
                "has other weights. Use nodes that patch the MODEL instead, or save it as a file."
            )
        network = model.model.diffusion_model
        layer = comfy.utils.get_attr(network, name.rpartition(".")[0]) if "." in name else network
        if weight.dtype == stored.dtype:
            comfy.utils.set_attr_param(network, name, stored)
        elif weight.dtype == torch.float32 and stored.dtype in HALF and hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True  # ComfyUI's mark of a weight in another dtype than the layer computes in
            comfy.utils.set_attr_param(network, name, stored)


def _pairs(model: comfy.model_patcher.ModelPatcher, path: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, weight, tensor of the file) for each weight that is not packed, paired as ComfyUI's loaders do."""
    tensors = comfy.utils.load_torch_file(str(path))
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    tensors = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True) or tensors
    tensors = model.model.model_config.process_unet_state_dict(tensors)
    for name, weight in list(model.model.diffusion_model.named_parameters()):
        stored = tensors.get(name)
        if stored is not None and type(weight.data) is torch.Tensor and weight.shape == stored.shape and weight.numel():
            yield name, weight.data, stored


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the middle of a tensor in this dtype, as bytes, so that NaN equals NaN."""
    start = max(0, (tensor.numel() - COMPARED) // 2)
    return tensor.reshape(-1)[start : start + COMPARED].to("cpu", dtype).view(torch.uint8)
