"""Room on the GPU that ComfyUI uses: its own models give way to what ranks need there.

ComfyUI counts the ranks' weights (patcher.py). It cannot know of the ranks' keys and values, activations and libraries.
"""

import logging

import comfy.model_management
import torch

log = logging.getLogger(__name__)


def comfyui_gpus() -> set[torch.device]:
    """GPUs on which ComfyUI's process computes or has models.

    It has nothing on others. To ask for room there would only make a CUDA context of some 500 MB for its process.
    """
    management = comfy.model_management
    listed = management.current_loaded_models
    own = {loaded.device for loaded in listed if not getattr(loaded.model, "on_ranks", False)}
    return {device for device in own | {management.get_torch_device()} if not management.is_device_cpu(device)}


def make_room(device: str, missing: int) -> int:
    """Have ComfyUI free `missing` bytes more on `device`, such as cuda:0. Bytes that came free; 0 on a GPU it does not use.

    Models that ComfyUI has loaded for the present sampling, such as a ControlNet, stay. So does its reserve for itself, and
    every MODEL on ranks: to unload another one of the same weights would unload the one that asks.
    """
    management, place = comfy.model_management, torch.device(device)
    if place not in comfyui_gpus():
        return 0
    before = torch.cuda.mem_get_info(place)[0]
    listed = management.current_loaded_models
    in_use = [loaded for loaded in listed if loaded.currently_used or getattr(loaded.model, "on_ranks", False)]
    management.free_memory(before + missing + management.extra_reserved_memory(), place, keep_loaded=in_use)
    management.soft_empty_cache()
    freed = max(0, torch.cuda.mem_get_info(place)[0] - before)
    log.info("Parallel DiT: ranks lack %.1f GB on %s; ComfyUI freed %.1f GB", missing / 1e9, device, freed / 1e9)
    return freed
