"""Starts a model's ranks while other nodes, such as text encoders, still compute for its first image."""

import comfy.model_management

from parallel_backend.client.registry import registry
from parallel_backend.core.devices import on_ray
from parallel_backend.placement.gpu_overheads import context_bytes

from ..ui.prompt_graph import feeds_a_sampler, text_encoder_bytes
from .patcher import RemoteModelPatcher


def start_ranks_of(model: RemoteModelPatcher) -> None:
    """Begin to start the ranks of `model`, if the prompt samples with it. Never waits; starts nothing on a Ray cluster, nor
    if the prompt's text encoder would lack their memory: they start after it."""
    devices = model.model.diffusion_model.devices
    if not any(map(on_ray, devices)) and feeds_a_sampler() and leave_room(devices, text_encoder_bytes()):
        registry().begin(devices)


def leave_room(devices: tuple[str, ...], encoder: int) -> bool:
    """Whether new ranks on `devices` leave room for `encoder` bytes of text encoders on the GPU that runs them.

    ComfyUI decides by the free memory, when it loads a text encoder, whether the GPU gets all of it.
    """
    management = comfy.model_management
    gpu = management.text_encoder_device()
    ranks = devices.count(str(gpu))
    if management.is_device_cpu(gpu) or not (ranks and encoder):
        return True
    needed = ranks * context_bytes(str(gpu)) + encoder + management.minimum_inference_memory()
    return management.get_free_memory(gpu) >= needed
