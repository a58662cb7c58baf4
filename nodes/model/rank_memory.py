"""Lets ComfyUI's model management count and free the ranks' memory on GPUs that ComfyUI uses too.

When ComfyUI needs memory on a GPU, it asks the models that it has loaded there. The ranks on that GPU then move that many
bytes of weights, block by block, to host memory (client/resident_weights.py). They move the weights back in their next run.
"""

import weakref
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import torch
from comfy_execution.utils import get_executing_context

from parallel_backend.client.registry import registry
from parallel_backend.placement.gpu_overheads import context_bytes

from .run.make_room import comfyui_gpus

if TYPE_CHECKING:
    from .call.diffusion_model import RemoteDiffusionModel

ALL = 1e32
"""Bytes without a limit, as ComfyUI writes it."""


class SizeWithRanks(int):
    """Bytes of a model: `local` bytes in this process, the others on ranks. In a sum it only counts as `local`.

    `load_models_gpu` adds up the sizes of the models that it loads, and takes the sum for the page-locked memory that
    ComfyUI's process needs. If memory is short, it drops the text encoder. Ranks need no page-locked memory in that process.
    ComfyUI asks a GPU for another figure: the size minus the loaded bytes. The ranks' bytes count there.
    """

    local: int

    def __new__(cls, local: int, on_ranks: int):
        made = super().__new__(cls, local + on_ranks)
        made.local = local
        return made

    def __radd__(self, other):
        return other + self.local


class RankMemoryPatcher(comfy.model_patcher.ModelPatcher):
    """ModelPatcher of a model whose weights are on ranks: ComfyUI counts and takes the weights on `load_device`. ComfyUI
    does not manage the memory of a CPU, so there the ranks' bytes count as 0 and ranks keep everything."""

    on_ranks = True
    """Distinguishes models on ranks from ComfyUI's own in its list of loaded models (make_room.py)."""

    @property
    def stub(self) -> "RemoteDiffusionModel | None":
        """The model. None: it has been freed."""
        raise NotImplementedError

    def model_size(self):
        """Bytes of the model in this process, and of the ranks on this GPU while no other program needs them."""
        return SizeWithRanks(self._local_bytes(), self._wanted_bytes())

    def current_loaded_device(self):
        """The GPU, as if the model were loaded: ComfyUI then asks the GPU for `model_size` minus `loaded_size`."""
        return self.load_device

    def loaded_size(self):
        return (self._local_bytes() if self.model.model_loaded_weight_memory else 0) + self.rank_bytes()

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Like ComfyUI's method, but always loads fully, because this process has few bytes. Ranks load at the first
        call."""
        return super().partially_load(device_to, ALL, force_patch_weights)

    def partially_unload(self, device_to, memory_to_free=0, *arguments, **named):
        """Have the ranks on this GPU free `memory_to_free` bytes. Returns the freed bytes. If that is not enough, ComfyUI
        unloads the whole model."""
        if self._on_cpu() or (stub := self.stub) is None:
            return 0
        return registry().models.give_back(stub.setup, str(self.load_device), memory_to_free)

    def detach(self, unpatch_all=True):
        """Like ComfyUI's method. With `unpatch_all` the ranks free all their bytes on this GPU. Without it another clone
        takes over.

        If no node is running, the user has asked to unload models: then the ranks free their bytes on all devices. They do
        the same if the host has too little memory for this GPU's bytes.
        """
        if unpatch_all and (stub := self.stub) is not None:
            asked_by_a_node = not self._on_cpu() and get_executing_context() is not None
            if asked_by_a_node:
                registry().models.give_back(stub.setup, str(self.load_device), ALL)
            if not asked_by_a_node or self.rank_bytes():
                registry().unload(stub.setup)
        return super().detach(unpatch_all)

    def rank_bytes(self) -> int:
        """Return the bytes of weights and adapters that ranks have on this GPU now."""
        if self._on_cpu() or (stub := self.stub) is None:
            return 0
        return registry().models.bytes_on(stub.setup, str(self.load_device))

    def _wanted_bytes(self) -> int:
        """Return the bytes of weights and adapters that ranks take on this GPU while no other program needs them.

        Before loading, an estimate: equal shares of the weights, whatever stage_split says, and the memory of processes that
        are not running yet.
        """
        if self._on_cpu() or (stub := self.stub) is None:
            return 0
        setup, device = stub.setup, str(self.load_device)
        if (wanted := registry().models.wanted_on(setup, device)) is not None:
            return wanted
        process = 0 if registry().pools.serves(setup.devices) else context_bytes(device)
        share = stub.whole_bytes // (setup.degrees.pipe * setup.degrees.tensor)
        return setup.devices.count(device) * (share + process)

    def _on_cpu(self) -> bool:
        return comfy.model_management.is_device_cpu(self.load_device)

    def _local_bytes(self) -> int:
        """Return the bytes in this process. (ComfyUI would use `state_dict`, which lists the ranks' weights.)"""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))


class OnAnotherGPU(RankMemoryPatcher):
    """Stands for a MODEL's ranks on a GPU other than the MODEL's load_device, if ComfyUI has another model on it.

    ComfyUI loads this patcher together with the MODEL, so that it can ask these ranks for memory. Select CLIP Device, for
    instance, puts another model on such a GPU.
    """

    def __init__(self, model, load_device, *arguments, **named):
        self.load_device = load_device
        super().__init__(model, load_device, *arguments, **named)

    @classmethod
    def of(cls, stub: "RemoteDiffusionModel", device: torch.device) -> "OnAnotherGPU":
        """Return the patcher for the ranks of `stub` on `device`."""
        holder = torch.nn.Module()
        object.__setattr__(holder, "stub", weakref.ref(stub))
        return cls(holder, device, torch.device("cpu"))

    @property
    def stub(self):
        return self.model.stub()


def other_gpus(load_device: torch.device, devices: tuple[str, ...]) -> list[torch.device]:
    """GPUs other than `load_device` that both ComfyUI and ranks on `devices` use."""
    return sorted((each for each in comfyui_gpus() - {load_device} if str(each) in devices), key=str)
