"""Starts a model's ranks while other nodes, such as text encoders, still compute for its first image."""

from parallel_backend.client.registry import registry
from parallel_backend.core.devices import on_ray

from ..ui.prompt_graph import present_prompt
from .patcher import RemoteModelPatcher


def start_ranks_of(model: RemoteModelPatcher) -> None:
    """Begin to start the ranks of `model` if a prompt has loaded it. Never waits. Starts nothing on a Ray cluster."""
    devices = model.model.diffusion_model.devices
    if present_prompt() is not None and not any(map(on_ray, devices)):
        registry().begin(devices)
