"""Parallelize Model, KSampler and Parallel VAE Decode with ranks on cards, against the same on CPU ranks. Run by serve.py.

The cards are emulated CUDA devices, in the ranks' processes and in this one. ComfyUI's own device is the first card.
"""

import functools
import sys
from collections.abc import Callable
from unittest.mock import patch

import controlnet
from boot import Results, comfy, difference, ksampler, node, nodes, outputs_of, random_prompts, torch
from parallelize import LATENT, two_loras
from vae import image_vae, latent

FILE = "tiny.safetensors"
KINDS = {"cpu": ("cpu", "cpu"), "cards": ("cuda:0", "cuda:1")}


def sampled(model, texts=None) -> torch.Tensor:
    """Twice: the second run finds what the first has left."""
    texts = random_prompts(9, 5) if texts is None else texts
    return torch.cat([ksampler(model, texts, LATENT, steps=3, seed=seed) for seed in (1, 2)])


def main(results: Results) -> None:
    """Each case: how far ranks on cards are from CPU ranks, the devices of both, and the cards' bytes after unloading."""
    from parallel_backend.client.registry import registry
    from parallel_backend.processes.pool import Pool
    from tests.support.emulated_gpu.machine import machine

    pack = sys.modules[nodes.NODE_CLASS_MAPPINGS["ParallelizeModel"].__module__]
    model_of = pack.model_of  # with stages by number: by measured times they would be others on each pool
    pack.model_of = lambda *given: model_of(*given[:4], given[4] | {"stage_split": "even"}, *given[5:])
    results.case("device", lambda: str(comfy.model_management.get_torch_device()))

    def taken(mode: str, change: Callable = lambda model: model):
        return node("ParallelizeModel", change(node("UNETLoader", FILE, "default")), 2, mode)

    kind = controlnet.Kind(FILE, functools.partial(controlnet.flux, False), (1, 16, 8, 12), None)
    texts = kind.apply(random_prompts(9, 5), kind.control_net(kind.module()))
    vae = image_vae(4)
    vae.first_stage_model.float()
    vae.vae_dtype = torch.float32  # as CPU ranks compute
    cases: dict[str, Callable[[str], torch.Tensor]] = {
        "LoRA": lambda _devices: sampled(taken("ulysses", two_loras)),
        "ControlNet pipefusion": lambda _devices: sampled(taken("pipefusion"), texts),
        "VAE": lambda devices: node("ParallelVAEDecode", {"samples": latent(1, 4, 9, 8)}, vae, devices),
    }

    def on(kind: str, name: str) -> tuple[torch.Tensor, tuple[str, ...], list[int]]:
        """The result, the devices of the ranks, and the bytes that Unload leaves on the cards."""
        possible = KINDS[kind] if kind == "cards" else KINDS[kind][:1]
        with patch.object(pack, "possible_devices", lambda _text: possible):
            found = cases[name](",".join(KINDS[kind]))
        pool = registry().pools.working[-1]
        assert isinstance(pool, Pool)
        registry().unload()
        return found.cpu(), pool.devices, machine.reserved_elsewhere

    for name in cases:
        results.case(name, functools.partial(on, "cpu", name))
    expected = {name: results.found.pop(name) for name in cases if name in results.found}

    def compared(name: str) -> dict[str, object]:
        values, cpus, _ = expected[name]
        found, cards, left = on("cards", name)
        return {"difference": difference(values, found), "devices": [*cpus, *cards], "left": left}

    for name in cases:
        results.case(name, functools.partial(compared, name))

    def doctor() -> str:
        """The report about the first card, and another GPU beside it."""
        model, prompt = node("UNETLoader", FILE, "default"), texts[0]
        inputs = (node("ParallelizeModel", model, 1, "auto"), {"samples": LATENT}, 20, 1.0, 1, "cuda:0", prompt)
        return outputs_of("ParallelDoctor", *inputs, "RTX 3090 24 GB, PCIe x8")["result"][0]

    results.case("doctor", doctor)
    registry().close()
