"""A custom node pack for tests only, without a node: CPU ranks have devices of their own memory, and have to give way in it.

Each time that ComfyUI loads models for a node, a text encoder or what is to be sampled, the ranks hand over a part of what
one of their devices has, or all of it, as they do on a GPU where ComfyUI needs the room.
"""

import random
import sys
from pathlib import Path

import comfy.model_management

sys.path.append(str(Path(__file__).resolve().parents[3]))  # as Parallel DiT's own, which may be imported later

from parallel_backend.client.registry import registry
from parallel_backend.core.setup import Setup
from testing.emulated_device import EmulatedDevice, start_with

NODE_CLASS_MAPPINGS = {}
BUDGET, RATE = 1 << 30, 2e9
"""Bytes of each device, and bytes a second to and from it."""
SHARES = 0.0, 0.3, 0.7, 1.0
"""Of the weights on a device: what ComfyUI asks for."""


def giving_way(load_models_gpu, chance: random.Random):
    """`load_models_gpu`, before which the ranks give way."""
    used: list[Setup] = []

    def load(models, *arguments, **named):
        for key in used:
            device = chance.choice(key.devices)
            registry().give_back(key, device, chance.choice(SHARES) * registry().bytes_on(key, device))
        keys = [getattr(getattr(each.model, "diffusion_model", None), "key", None) for each in models]
        used[:] = [key for key in keys if key is not None] or used
        return load_models_gpu(models, *arguments, **named)

    return load


registry().start_of = lambda devices: start_with(EmulatedDevice(BUDGET, RATE))
comfy.model_management.load_models_gpu = giving_way(comfy.model_management.load_models_gpu, random.Random(0))
