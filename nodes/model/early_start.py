"""Starts a model's ranks while other nodes, such as text encoders, still compute for its first picture."""

from parallel_backend.client.registry import registry
from parallel_backend.core.devices import on_ray

from ..ui.prompt_graph import feeds_a_sampler
from .patcher import RemoteModelPatcher


def start_ranks_of(model: RemoteModelPatcher) -> None:
    """Begin to start the ranks of `model` and to read its files, if the prompt samples with it. Never waits; starts nothing
    on a Ray cluster."""
    diffusion_model = model.model.diffusion_model
    devices = diffusion_model.devices
    if not any(map(on_ray, devices)) and feeds_a_sampler():
        registry().begin(devices, diffusion_model.checkpoint.files)
