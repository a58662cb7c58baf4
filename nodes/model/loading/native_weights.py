"""A native model that ranks replace: checks that its weights are still its file's, and gives back its memory."""

import sys
from collections.abc import Iterator
from pathlib import Path

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import folder_paths
import torch

from parallel_backend.checkpoints.tensor_files import GGUF

from ...ui.other_nodes import definition

HALF = torch.bfloat16, torch.float16
"""Dtypes that convert to fp32 without loss."""
COMPARED = 4096
"""Values in the middle of each tensor that are compared with the file: a page or two of the file for each tensor."""


def unload(model: comfy.model_patcher.ModelPatcher) -> None:
    """Unload the native model from its devices, if it was sampled before. ComfyUI then undoes patches in its weights."""
    loaded = [each.model for each in comfy.model_management.current_loaded_models]
    if any(patcher is not None and patcher.is_clone(model) for patcher in loaded):
        comfy.model_management.unload_model_and_clones(model, unload_additional_models=False)


def check_not_rewritten(model: comfy.model_patcher.ModelPatcher) -> None:
    """ValueError for a module, forward or hook that a node has put into the native model: the file does not have it."""
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
    """Replaces the native model's copies of the file's weights by views of the mapped file, which need no memory.

    ComfyUI keeps the loader's output as long as the workflow is open. The MODEL can still be sampled without ranks: weights
    that the loader has widened to fp32 are then widened at each use by ComfyUI's layers. Weights that it has rounded (to
    fp8) stay copies. With ComfyUI's dynamic loading, and of GGUF files, all weights are views already. ValueError for
    weights that differ from the file's, because a node has written into them.
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
    """(name, weight, tensor of the file), as ComfyUI's loaders pair them, without packed weights."""
    tensors = comfy.utils.load_torch_file(str(path))
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    tensors = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True) or tensors
    tensors = model.model.model_config.process_unet_state_dict(tensors)
    for name, weight in list(model.model.diffusion_model.named_parameters()):
        stored = tensors.get(name)
        if stored is not None and type(weight.data) is torch.Tensor and weight.shape == stored.shape and weight.numel():
            yield name, weight.data, stored


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The middle of a tensor in this dtype, as bytes, so that NaN equals NaN."""
    start = max(0, (tensor.numel() - COMPARED) // 2)
    return tensor.reshape(-1)[start : start + COMPARED].to("cpu", dtype).view(torch.uint8)
