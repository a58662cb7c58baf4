"""What ComfyUI's model management sees of the ranks' memory on the GPUs that it uses, and how it takes it.

ComfyUI asks the model that it has loaded on a GPU for room there. The ranks on that GPU hand over as much as is asked, block
by block, into host memory (client/giving_way.py), and take it back in their next run.
"""

import weakref
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import torch
from comfy_execution.utils import get_executing_context

from parallel_backend.client.registry import registry
from parallel_backend.placement.gpu_overheads import context_bytes

from .make_room import comfyui_gpus

if TYPE_CHECKING:
    from .diffusion_model import RemoteDiffusionModel

ALL = 1e32
"""Bytes without a limit, as ComfyUI writes it."""


class RankMemoryPatcher(comfy.model_patcher.ModelPatcher):
    """ModelPatcher of a model whose weights are on ranks: ComfyUI counts and takes those on `load_device`.

    `stub` has the model. On a CPU, whose memory ComfyUI does not manage, ranks count nothing and keep all.
    """

    on_ranks = True
    """What a run takes room for (make_room.py)."""

    @property
    def stub(self) -> "RemoteDiffusionModel | None":
        """None: the model is gone."""
        raise NotImplementedError

    def model_size(self):
        """Bytes in this process, and those that the ranks want on this GPU: what they have if nobody needs room."""
        return self._own_bytes() + self._wanted_bytes()

    def loaded_size(self):
        return (self._own_bytes() if self.model.model_loaded_weight_memory else 0) + self.rank_bytes()

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """As ComfyUI's, always in full: this process has little of the model, and the ranks load at the first call."""
        return super().partially_load(device_to, ALL, force_patch_weights)

    def partially_unload(self, device_to, memory_to_free=0, *arguments, **named):
        """Have the ranks on this GPU hand over so many bytes. Bytes that came free; ComfyUI unloads where they are less."""
        if self._on_cpu() or (stub := self.stub) is None:
            return 0
        return registry().give_back(stub.key, str(self.load_device), memory_to_free)

    def detach(self, unpatch_all=True):
        """As ComfyUI's. With `unpatch_all` the ranks give up all that they have on this GPU; without it another clone takes
        this one's place.

        Where no node asks for room it is the user who unloads models: then ranks free all that they have, everywhere. So
        they do where the host has no room either.
        """
        if unpatch_all and (stub := self.stub) is not None:
            asked_by_a_node = not self._on_cpu() and get_executing_context() is not None
            if asked_by_a_node:
                registry().give_back(stub.key, str(self.load_device), ALL)
            if not asked_by_a_node or self.rank_bytes():
                registry().unload(stub.key)
        return super().detach(unpatch_all)

    def rank_bytes(self) -> int:
        """Bytes of weights and adapters that ranks have on this GPU now."""
        if self._on_cpu() or (stub := self.stub) is None:
            return 0
        return registry().bytes_on(stub.key, str(self.load_device))

    def _wanted_bytes(self) -> int:
        """Of weights and adapters, if nobody needs room. Before loading: equal shares of the weights (stage_split may
        differ), and the ranks' processes where they have not started yet."""
        if self._on_cpu() or (stub := self.stub) is None:
            return 0
        key, device = stub.key, str(self.load_device)
        if (wanted := registry().wanted_on(key, device)) is not None:
            return wanted
        process = 0 if registry().runs_on(key.devices) else context_bytes(device)
        share = stub.whole_bytes // (key.degrees.pipe * key.degrees.tensor)
        return key.devices.count(device) * (share + process)

    def _on_cpu(self) -> bool:
        return comfy.model_management.is_device_cpu(self.load_device)

    def _own_bytes(self) -> int:
        """Bytes in this process. (`state_dict` lists weights that are elsewhere.)"""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))


class OnAnotherGPU(RankMemoryPatcher):
    """A MODEL's ranks on a GPU that is not its own, where ComfyUI has something too, such as a text encoder (Select CLIP
    Device). ComfyUI loads it with the MODEL, so that it can ask for room there."""

    def __init__(self, model, load_device, *arguments, **named):
        self.load_device = load_device
        super().__init__(model, load_device, *arguments, **named)

    @classmethod
    def of(cls, stub: "RemoteDiffusionModel", device: torch.device) -> "OnAnotherGPU":
        """For the ranks of `stub` on `device`."""
        place = torch.nn.Module()
        object.__setattr__(place, "stub", weakref.ref(stub))
        return cls(place, device, torch.device("cpu"))

    @property
    def stub(self):
        return self.model.stub()


def other_gpus(own: torch.device, devices: tuple[str, ...]) -> list[torch.device]:
    """GPUs but `own` that both ComfyUI and ranks on `devices` use."""
    return sorted((each for each in comfyui_gpus() - {own} if str(each) in devices), key=str)
