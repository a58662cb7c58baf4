"""Small classes on ranks against ComfyUI's own MODEL of the same file. Run by serve.py."""

import math
from collections.abc import Collection, Mapping
from functools import cache, partial
from types import MappingProxyType

import comfy
import torch
from boot import (
    MODELS,
    Results,
    difference,
    ksampler,
    masking,
    native_model,
    node,
    parallel,
    parts_of,
    sequence,
    sharing_small_lists,
)
from safetensors.torch import load_file, save_file
from small_cases import small
from small_models import entries, latent, prompts, small_model, write

UNETS = "SD15", "SDXL"
MORE = {
    "wan_s2v": {"audio_embed": (25, 1024, 12)},
    "wan_humo": {"audio_embed": (3, 8, 5, 1280)},
    "wan_dancer": {"audio_embed": (9, 35)},
}
"""Shapes of conditioning with which a class runs once more."""
NO_MORE: Mapping[str, tuple[int, ...]] = MappingProxyType({})
FOUR = "cpu,cpu,cpu,cpu"


def in_patches(file: str, warmup_steps: int):
    return node("ApplyPipeFusion", parallel(file), 2, warmup_steps, True)


def displaced(file: str, warmup_steps: int):
    config = sequence(patch_mode="displaced", patch=2, patch_warmup_steps=warmup_steps)
    return parallel(file, pipe=1, config=config, stage_split="even")


MODES = {
    "one rank": partial(parallel, pipe=1, devices="cpu"),
    "stages": parallel,
    "split batch": partial(parallel, pipe=1, batch=2),
    "tensor": partial(parallel, pipe=1, tensor=2),
    "ulysses": partial(parallel, pipe=1, config=sequence(ulysses=2)),
    "ring": partial(parallel, pipe=1, config=sequence(ring=2)),
    "ulysses and stages": partial(parallel, devices=FOUR, config=sequence(ulysses=2)),
    "tensor and ring": partial(parallel, pipe=1, tensor=2, devices=FOUR, config=sequence(ring=2)),
    "PipeFusion with all steps exact": partial(in_patches, warmup_steps=1000),
    "PipeFusion with one exact step": partial(in_patches, warmup_steps=1),
    "displaced patches with all steps exact": partial(displaced, warmup_steps=1000),
    "displaced patches with one exact step": partial(displaced, warmup_steps=1),
}


SAMPLED = {
    "v": {"v_pred": torch.empty(0), "ztsnr": torch.empty(0)},
    "v in EDM": {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.01)},
    "as usual": {},
}
"""Tensors by which an SDXL's file says how it is sampled."""


def main(results: Results, names: list[str], only: Collection[str] = (), is_sampled: bool = False) -> None:
    """`only`: modes, without which there are all. `is_sampled`: an SDXL's sampling alone."""
    if is_sampled:
        with small("SDXL"):
            tensors = load_file(write("SDXL"))
            for said, marks in SAMPLED.items():
                results.case(said, partial(samplings, tensors, marks))
        return
    for name in names:
        with small(name), sharing_small_lists():
            for more in (NO_MORE, MORE[name]) if name in MORE else (NO_MORE,):
                sampled(results, name, more, only)
            if name in UNETS:
                with_lora(results, name)


def samplings(tensors: dict[str, torch.Tensor], marks: dict[str, torch.Tensor]) -> list[list]:
    """How the MODEL on ranks and ComfyUI's own are sampled, of a file that has the transformer's prefix, and of one that has
    not."""
    plain, whole = MODELS / "sampled.safetensors", MODELS / "whole.safetensors"
    save_file(tensors | marks, plain)
    save_file({f"model.diffusion_model.{key}": value for key, value in tensors.items()} | marks, whole)
    checkpoint = comfy.sd.load_checkpoint_guess_config(str(whole), output_vae=False, output_clip=False)[0]
    models = parallel(plain.name, 1, 2), native_model(plain), parallel(whole.name, 1, 2), checkpoint
    sampled = [model.model.model_sampling for model in models]
    return [
        [*(kind.__name__ for kind in type(each).__mro__), float(each.sigma_max), float(each.sigma_min)] for each in sampled
    ]


def with_lora(results: Results, name: str) -> None:
    """A LoRA of a UNet's linear layers and convolutions."""
    g, file = torch.Generator().manual_seed(3), f"{name}.safetensors"
    native = native_model(file)
    lora = {}
    for key, value in list(native.model.diffusion_model.state_dict().items()):
        if key.endswith("weight") and value.ndim > 1 and ("attn" in key or "layers" in key or "skip" in key):
            out, into, *kernel = value.shape
            ones = [1] * len(kernel)
            layer = f"diffusion_model.{key.removesuffix('.weight')}"
            lora[f"{layer}.lora_up.weight"] = 0.3 * torch.randn(out, 4, *ones, generator=g)
            down = torch.randn(4, into, *kernel, generator=g)
            lora[f"{layer}.lora_down.weight"] = down / math.sqrt(down[0].numel())

    def sampled(model, lora: dict) -> torch.Tensor:
        patched = comfy.sd.load_lora_for_models(model, None, dict(lora), 0.7, 0.0)[0] if lora else model
        return ksampler(patched, prompts(name), latent(name), steps=3)

    def case(model) -> dict[str, float]:
        plain, expected = sampled(native, {}), sampled(native, lora)
        largest = float(expected.abs().max())
        moved = difference(plain, expected) / largest
        return {"share": difference(expected, sampled(model, lora)) / largest, "moved": moved}

    results.case(f"{name}, LoRA", lambda: case(parallel(file, pipe=1, batch=2)))
    results.case(f"{name}, Parallelize Model", lambda: case(node("ParallelizeModel", native, 2, "auto")))


def sampled(results: Results, name: str, more: Mapping[str, tuple[int, ...]], only: Collection[str]) -> None:
    """`more`: entries of the conditioning that the small model's own lack."""
    file, conditioning = f"{name}.safetensors", prompts(name)
    for (entry,) in conditioning:
        entry[1] |= entries(more, torch.Generator().manual_seed(2))
    native = native_model(file)
    if small_model(name).get("boolean_masks"):
        native = masking(native)

    @cache
    def expected():
        return ksampler(native, conditioning, latent(name), steps=3)

    def compare(make) -> float:
        largest = max(float(part.abs().max()) for part in parts_of(expected()))
        return difference(expected(), ksampler(make(file), conditioning, latent(name), steps=3)) / largest

    for mode, make in MODES.items():
        case = ", ".join((*more, mode))
        if not only or case in only or mode in only:
            results.case(f"{name}, {case}", partial(compare, make))
