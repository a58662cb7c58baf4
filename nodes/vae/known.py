"""Decides how a VAE of ComfyUI is cut for the ranks, or why it cannot be cut."""

from collections.abc import Collection
from dataclasses import dataclass

import comfy.quant_ops
import comfy.sd
import torch

from parallel_backend.client.vae import Part
from parallel_backend.own_class.built.module_tree import Tree, described

from .rows import KNOWN, Known

OTHER = {"decoder": "encoder", "encoder": "decoder"}


@dataclass(frozen=True)
class Cut:
    """A part of a VAE that can be cut."""

    known: Known
    tree: Tree


def how_to_cut(vae: comfy.sd.VAE, part: Part, dims: int) -> Cut | str:
    """Return how this VAE's part is cut, or the reason why not, in words that follow 'since'. `dims`: axes of the latent."""
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model
    known = KNOWN.get(type(getattr(model, part, None)).__module__)
    if known is None or dims != 2 + vae.latent_dim:
        return f"a VAE of this kind ({type(model).__name__}) cannot be cut"
    if (reason := known.why_not(model)) is not None:
        return reason
    if _patched(vae) or type(vae) is not comfy.sd.VAE or part.removesuffix("r") in {*vars(vae), *vars(model)}:
        return "another node has changed this VAE"
    if any(_changed(each, known.paddings) for each in _modules(model, part)):
        return "another node has changed this VAE's layers"
    tree = described(model, without=(OTHER[part],))
    tree["values"] |= known.values
    return Cut(known, tree)


def tensors_of(vae: comfy.sd.VAE) -> dict[str, torch.Tensor]:
    """Return the VAE's tensors by their names in ComfyUI's class. A layer's quantized weight is one tensor that can be
    expanded (`QuantizedTensor.dequantize`); its scales and settings are left out."""
    model = vae.first_stage_model
    tensors = dict(model.named_buffers(remove_duplicate=False)) | vae.get_sd()
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, comfy.quant_ops.QuantizedTensor):
            kept = {f"{name}.weight": weight, f"{name}.bias": module.bias}
            beside = {f"{name}.{leaf}" for leaf in ("comfy_quant", "input_scale")}
            tensors = {
                key: tensor for key, tensor in tensors.items() if key not in beside and not key.startswith(f"{name}.weight")
            }
            tensors |= {key: tensor for key, tensor in kept.items() if tensor is not None}
    return tensors


def _patched(vae: comfy.sd.VAE) -> bool:
    """Return whether nodes have put patches on this VAE, or the model still has the patches of another VAE object."""
    patcher = vae.patcher
    loaded = (each.model for each in comfy.model_management.current_loaded_models)
    if any(each is not None and each.model is patcher.model and each.object_patches_backup for each in loaded):
        return True  # layers of the other object, which ComfyUI takes out when it loads this one
    uuid_in_weights = getattr(vae.first_stage_model, "current_weight_patches_uuid", None)
    added = patcher.patches or patcher.object_patches or patcher.weight_wrapper_patches or patcher.injections
    return bool(added) or uuid_in_weights not in (None, patcher.patches_uuid)


def _modules(model: torch.nn.Module, part: Part) -> list[torch.nn.Module]:
    """Return the model's modules without those of its other part."""
    return [module for name, module in model.named_modules() if name.partition(".")[0] != OTHER[part]]


def _changed(module: torch.nn.Module, paddings: Collection[str]) -> bool:
    """Whether the module differs from its class, or its class is neither ComfyUI's nor torch's.

    Nodes for tiling, seamless textures and fused kernels change modules in such ways.
    """
    attributes = vars(module)
    hooked = module._forward_hooks or module._forward_pre_hooks
    foreign = type(module).__module__.partition(".")[0] not in ("comfy", "torch")
    padded = attributes.get("padding_mode", "zeros") not in paddings
    return "forward" in attributes or "_conv_forward" in attributes or bool(hooked) or foreign or padded
