"""A native model whose place the ranks take: whether it is still what its file says, and its memory."""

import sys
from collections.abc import Iterator
from pathlib import Path

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import folder_paths
import torch

from ..ui.other_nodes import definition

HALF = torch.bfloat16, torch.float16
"""Dtypes whose values fp32 has all of."""
COMPARED = 4096
"""Values of a tensor that are compared with the file: its middle. A page or two of a large file for each tensor."""


def unload(model: comfy.model_patcher.ModelPatcher) -> None:
    """Take the native model off its devices, where it was sampled before. What was patched into its weights is undone."""
    loaded = [each.model for each in comfy.model_management.current_loaded_models]
    if any(patcher is not None and patcher.is_clone(model) for patcher in loaded):
        comfy.model_management.unload_model_and_clones(model, unload_additional_models=False)


def check_not_rewritten(model: comfy.model_patcher.ModelPatcher) -> None:
    """ValueError, by name, for what a node has put into the native model itself: its file knows nothing of that."""
    for name, module in model.model.diffusion_model.named_modules():
        kind = type(module)
        changed = None
        if _of_a_pack(kind.__module__):
            changed = kind
        elif getattr(module.forward, "__func__", module.forward) is not kind.forward:
            changed = definition(module.forward)
        elif module._forward_hooks or module._forward_pre_hooks:
            changed = "a hook"
        if changed is not None:
            what = changed if isinstance(changed, str) else f"{changed.__module__}.{changed.__qualname__}"
            raise ValueError(
                f"model: a node has put {what} in the place of the native model's '{name or 'forward'}', which cannot "
                "reach the ranks. Remove that node, or Parallelize Model."
            )


def _of_a_pack(module: str) -> bool:
    """Whether this module is in a folder of custom nodes."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(
        Path(file).is_relative_to(each) for each in folder_paths.get_folder_paths("custom_nodes")
    )


def give_back_memory(model: comfy.model_patcher.ModelPatcher, path: Path) -> None:
    """Weights of the native model that are copies of the file's become views of its map, which need no memory of their own.

    ComfyUI keeps the loader's output, so they would stay as long as the workflow is open. The MODEL remains as it was for
    who samples it without the ranks. Weights that the loader has widened to fp32 are widened at each use instead, by
    ComfyUI's own layers; those that it has rounded (to fp8) stay copies. Those of ComfyUI's dynamic loading are views
    already. ValueError for weights that are not the file's: a node has written into them.
    """
    if model.is_dynamic() or comfy.utils.DISABLE_MMAP:
        return
    for name, own, stored in _pairs(model, path):
        if not torch.equal(_bits(own, own.dtype), _bits(stored, own.dtype)):
            raise ValueError(
                f"model: a node has written into the native model's weights ({name}): they are not those of {path.name}, "
                "which the ranks read. Use nodes that patch the MODEL instead, or save it as a file."
            )
        layer = comfy.utils.get_attr(model.model.diffusion_model, name.rpartition(".")[0]) if "." in name else None
        if own.dtype == stored.dtype:
            comfy.utils.set_attr_param(model.model.diffusion_model, name, stored)
        elif own.dtype == torch.float32 and stored.dtype in HALF and hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True  # as ComfyUI has it for weights in another dtype than what it computes in
            comfy.utils.set_attr_param(model.model.diffusion_model, name, stored)


def _pairs(model: comfy.model_patcher.ModelPatcher, path: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, weight, tensor of the file, as ComfyUI's loaders pair them; not where the weight is packed."""
    tensors = comfy.utils.load_torch_file(str(path))
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    tensors = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True) or tensors
    tensors = model.model.model_config.process_unet_state_dict(tensors)
    for name, own in list(model.model.diffusion_model.named_parameters()):
        stored = tensors.get(name)
        if stored is not None and type(own.data) is torch.Tensor and own.shape == stored.shape and own.numel():
            yield name, own.data, stored


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The middle of a tensor in this dtype, as bytes: NaN equals itself."""
    start = max(0, (tensor.numel() - COMPARED) // 2)
    return tensor.reshape(-1)[start : start + COMPARED].to("cpu", dtype).view(torch.uint8)
