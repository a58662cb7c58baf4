"""Memory on the GPU that ComfyUI uses: its own models make room for the ranks. ComfyUI counts the ranks' weights
(rank_memory.py). It cannot know about their keys and values, activations and libraries."""

import logging

import comfy.model_management
import torch

log = logging.getLogger(__name__)


def comfyui_gpus() -> set[torch.device]:
    """GPUs on which ComfyUI's process computes or has models. Asking for memory on another GPU would only create a CUDA
    context there for ComfyUI's process, about 500 MB."""
    management = comfy.model_management
    loaded_models = management.current_loaded_models
    with_models = {loaded.device for loaded in loaded_models if not getattr(loaded.model, "on_ranks", False)}
    return {device for device in with_models | {management.get_torch_device()} if not management.is_device_cpu(device)}


def make_room(device: str, missing: int) -> int:
    """Have ComfyUI free `missing` more bytes on `device`, such as cuda:0. Returns the freed bytes; 0 on a GPU it does not
    use.

    Models that the present sampling uses, such as a ControlNet, stay loaded, and ComfyUI's reserve stays free. Every MODEL
    on ranks stays too: unloading one MODEL would unload all others of the same weights, including the one that asks.
    """
    management, gpu = comfy.model_management, torch.device(device)
    if gpu not in comfyui_gpus():
        return 0
    before = torch.cuda.mem_get_info(gpu)[0]
    loaded_models = management.current_loaded_models
    in_use = [loaded for loaded in loaded_models if loaded.currently_used or getattr(loaded.model, "on_ranks", False)]
    management.free_memory(before + missing + management.extra_reserved_memory(), gpu, keep_loaded=in_use)
    management.soft_empty_cache()
    freed = max(0, torch.cuda.mem_get_info(gpu)[0] - before)
    log.info("Parallel DiT: ranks lack %.1f GB on %s; ComfyUI freed %.1f GB", missing / 1e9, device, freed / 1e9)
    return freed
