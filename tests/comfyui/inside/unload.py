"""What ComfyUI's model management sees of the ranks' memory, and how it takes it. Run by serve.py.

There is no GPU here. Where a case needs one, ComfyUI is told that its CPU is one, with `free` bytes that its other models
leave on it; the memory that ranks on `cpu` hold then counts as on the GPU that ComfyUI uses.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from boot import Results, comfy, difference, ksampler, node, parallel, random_prompts, torch

FILE, SD3 = "tiny.safetensors", "tiny-sd3.safetensors"
CPU = torch.device("cpu")
management = comfy.model_management


@contextmanager
def gpu(free: float = 0.0) -> Iterator[None]:
    """ComfyUI takes its CPU for a GPU with this much free memory."""
    with (
        patch.object(management, "is_device_cpu", lambda device: False),
        patch.object(
            management, "get_free_memory", lambda device, torch_free_too=False: (free, 0) if torch_free_too else free
        ),
    ):
        yield


def main(results: Results) -> None:
    from comfy_execution.utils import CurrentNodeContext

    from parallel_backend.client.registry import registry

    prompts = random_prompts(9, 9)
    latent = torch.zeros(1, 16, 16, 16)
    model = parallel(FILE, stage_split="even")
    stub = model.model.diffusion_model

    def sample(which=model) -> torch.Tensor:
        return ksampler(which, prompts, latent)

    def held() -> int:
        return registry().models.bytes_on(stub.setup, "cpu")

    def listed(which=model) -> bool:
        return any(entry.model is not None and entry.model.is_clone(which) for entry in management.current_loaded_models)

    def sizes() -> dict[str, int]:
        return {"loaded": model.loaded_size(), "size": model.model_size(), "held": held()}

    with torch.inference_mode():
        own = model.model_size()
        with gpu():
            results.case("before loading", lambda: sizes() | {"own": own})
        expected = sample()

    def after(free) -> dict[str, float]:
        """What is left after `free`, and the difference of what the model then gives."""
        sample()
        before = held(), listed()
        free()
        left = held(), listed()
        return {
            "before": before,
            "left": left,
            "pids": len({*pids} & {*registry().pools.working[-1].ranks.pids}),
            "difference": difference(expected, sample()),
            "again": held(),
        }

    pids = registry().pools.working[-1].ranks.pids
    results.case("loaded, on CPU ranks", sizes)
    with gpu():
        results.case("loaded, on the GPU that ComfyUI uses", sizes)
    results.case("all", lambda: after(management.unload_all_models))
    results.case("clone swapped", lambda: after(lambda: model.detach(unpatch_all=False)))

    def make_room(required: float) -> None:
        with gpu(free=1000.0), CurrentNodeContext("prompt", "node"):
            management.free_memory(required, CPU)

    results.case("room for a little more", lambda: after(lambda: make_room(1001.0)))

    asked_for: list[float] = []

    def what_allocators_keep(freed: int) -> None:
        """A rank's allocator on the GPU gives `freed` bytes back."""
        with patch.object(registry().models, "give_back", lambda key, device, nbytes: asked_for.append(nbytes) or freed):
            make_room(1500.0)

    results.case("room in what allocators keep", lambda: after(lambda: what_allocators_keep(500)))
    results.case("too little in it", lambda: after(lambda: what_allocators_keep(499)))
    results.case("given back", lambda: asked_for)
    results.case("room that is there", lambda: after(lambda: make_room(999.0)))
    results.case("the node", lambda: after(lambda: node("UnloadParallelDiT")))

    def on_another_gpu() -> None:
        """ComfyUI's own GPU has no rank."""
        elsewhere = patch.object(model, "load_device", torch.device("cuda:7"))
        with gpu(), elsewhere, CurrentNodeContext("prompt", "node"):
            model.detach()

    results.case("room on another GPU", lambda: after(on_another_gpu))

    def handed_through() -> bool:
        given = object()
        return node("UnloadParallelDiT", given) is given

    results.case("handed through", handed_through)

    def other_model() -> dict[str, bool]:
        """The ranks hold SD3 too: nothing of it is the first model's to free."""
        sample()
        other = parallel(SD3, stage_split="even")
        sample(other)
        key = other.model.diffusion_model.setup
        with gpu():
            loaded = model.loaded_size(), other.loaded_size()
        model.detach()
        kept = registry().models.bytes_on(key, "cpu") > 0
        other.detach()
        return {"loaded": loaded, "own": own, "kept": kept, "freed": registry().models.bytes_on(key, "cpu") == 0}

    results.case("another model on the ranks", other_model)

    def between_steps() -> dict[str, float]:
        """Another node takes the ranks' memory in the middle of a run, whose later calls are prepared already."""
        loads = []

        def unload(step: int, *_arguments) -> None:
            if step == 1:
                registry().unload()
                loads.append(held())

        with patch("latent_preview.prepare_callback", lambda *_arguments: unload):
            return {"difference": difference(expected, sample()), "held": loads, "again": held()}

    results.case("between steps", between_steps)

    def dropped() -> dict[str, bool]:
        """Nobody has the MODEL any more, as when ComfyUI's cache lets it go: the ranks' memory must still be to be had."""
        local = parallel(FILE, pipe=1, batch=2, stage_split="even")
        sample(local.clone())
        key = local.model.diffusion_model.setup
        del local
        gc.collect()
        before = registry().models.bytes_on(key, "cpu")
        management.unload_all_models()
        return {"before": before, "after": registry().models.bytes_on(key, "cpu")}

    results.case("dropped", dropped)
