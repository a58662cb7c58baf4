"""What ComfyUI's model management does when ranks lack memory on a GPU that it uses. Run by serve.py.

There is no GPU here: torch.cuda is a stand-in with two cards, and the ranks, which are on the CPU, count as on cuda:0.
ComfyUI's other models are patchers whose memory is a figure on that card.
"""

import importlib.util
import sys
import weakref
from contextlib import ExitStack
from unittest.mock import patch

from boot import PACK, Results, comfy, difference, ksampler, parallel, random_prompts, torch

FILE = "tiny.safetensors"
MB = 1_000_000
management = comfy.model_management


def module_at(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class Resident(comfy.model_patcher.ModelPatcher):
    """A model of ComfyUI's own that has `size` bytes on the first card, all of them or none."""

    def __init__(self, cuda, size: int):
        self.load_device = torch.device("cuda:0")
        super().__init__(torch.nn.Module(), self.load_device, torch.device("cpu"), size)
        self.cuda, self.there = cuda, size
        cuda.hold(size)

    def model_size(self):
        return self.size

    def loaded_size(self):
        return self.there

    def partially_unload(self, *arguments, **named):
        return 0

    def detach(self, unpatch_all=True):
        self.cuda.hold(-self.there)
        self.there = 0

    def add_to_comfyui(self, currently_used: bool) -> None:
        entry = management.LoadedModel(self)
        entry.real_model, entry.currently_used = weakref.ref(self.model), currently_used
        entry.model_finalizer = weakref.finalize(self.model, lambda: None)
        management.current_loaded_models.append(entry)


def main(results: Results) -> None:
    from parallel_backend.client.memory_guard import MemoryGuard
    from parallel_backend.placement.device_memory import DeviceMemory

    fakes = module_at(PACK / "tests" / "support" / "fake_cuda.py", "fake_cuda")
    prompts = random_prompts(9, 9)
    latent = torch.zeros(1, 16, 16, 16)
    model = parallel(FILE, stage_split="even")
    expected = ksampler(model, prompts, latent)
    held = model.model.diffusion_model.whole_bytes
    model.detach()

    def evicted(free: int, idle: int, used: int) -> dict[str, object]:
        """Load and sample with `free` bytes on the card, beside an idle model of ComfyUI's and one that this run uses."""
        with ExitStack() as stack:
            cuda = stack.enter_context(fakes.fake_cuda(fakes.ADA, fakes.ADA))
            stack.enter_context(patch.object(management, "cpu_state", management.CPUState.GPU))
            stack.enter_context(patch.object(management, "get_torch_device", lambda: torch.device("cuda:0")))
            asked, listed = [], list(management.current_loaded_models)
            free_memory = management.free_memory

            def spy(required, device, *arguments, **named):
                if device == torch.device("cuda:0"):
                    asked.append(required)
                return free_memory(required, device, *arguments, **named)

            def memories(guard, poll) -> tuple[DeviceMemory, ...]:
                return (DeviceMemory("cuda:0", (0, 1), cuda.free(0), 0, cuda.cards[0].memory),)

            stack.enter_context(patch.object(management, "free_memory", spy))
            stack.enter_context(patch.object(MemoryGuard, "_device_memories", memories))
            residents = [Resident(cuda, idle), Resident(cuda, used)]
            for resident, in_use in zip(residents, (False, True), strict=True):
                resident.add_to_comfyui(in_use)
            cuda.hold_elsewhere(cuda.free(0) - free)
            try:
                difference_ = difference(expected, ksampler(model, prompts, latent))
                left = [resident.there for resident in residents]
            finally:
                model.detach()
                management.current_loaded_models[:] = listed
            return {"asked": asked, "left": left, "difference": difference_, "held": held}

    results.case("too little", lambda: evicted(free=MB, idle=500 * MB, used=100 * MB))
    results.case("nothing idle", lambda: evicted(free=MB, idle=0, used=100 * MB))
