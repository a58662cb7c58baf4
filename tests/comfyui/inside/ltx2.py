"""LTX-2's MODEL against ComfyUI's own for the same file, under LTX-2's own guiders and guidance. Run by serve.py.

The test process has put the case's files where inside/families.py reads them.
"""

from functools import partial
from typing import Any

import comfy.nested_tensor
import comfy.sample
from boot import BASE, Results, by_own_class, comfy, difference, parallel, torch
from comfy_extras import nodes_lt
from families import MODES, read

FRAMES, HEIGHT, WIDTH, SOUND = 6, 4, 4, 11


def conditionings(name: str, extras: dict[str, Any]) -> tuple[list, list]:
    return tuple([[text, known | extras]] for ((text, known),) in read(name)[:2])


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_guides() -> tuple[dict[str, Any], torch.Tensor]:
    """Extras of a CONDITIONING with two guides behind the video, the second one of half the size; the video's mask."""
    tokens = torch.cartesian_prod(torch.tensor([17, 30]), torch.arange(HEIGHT) * 32, torch.arange(WIDTH) * 32)
    places = torch.stack((tokens, tokens + torch.tensor([1, 32, 32])), dim=-1).transpose(0, 1)[None]
    entry = {"pre_filter_count": HEIGHT * WIDTH, "pixel_mask": None, "latent_shape": [1, HEIGHT, WIDTH]}
    half = entry | {"strength": 0.9, "pixel_mask": randn(3, 1, 1, 1, 64, 64).abs().clamp(max=1), "latent_shape": [1, 2, 2]}
    mask = torch.ones(1, 1, FRAMES, HEIGHT, WIDTH)
    mask[:, :, 0], mask[:, :, 1, 0], mask[:, :, -2], mask[:, :, -1] = 0.0, 0.5, 0.4, -1.8
    mask[:, :, -1, ::2, ::2] = 0.2
    voice = {"tokens": randn(4, 1, 3, 128)}
    return {
        "keyframe_idxs": places,
        "guide_attention_entries": [entry | {"strength": 0.6}, half],
        "ref_audio": voice,
    }, mask


def guided(model, what: str):
    """The MODEL with all guidance of LTX-2's own, or with a LoRA on blocks and connectors."""
    if what == "guidance":
        model = nodes_lt.LTXVSpatioTemporalGuidance.execute(model, 0.7, "1", 0.0, 1.0).args[0]
        return nodes_lt.LTXVModalityGuidance.execute(model, 2.0, 0.0, 1.0).args[0]
    if what == "lora":
        keys = ("transformer_blocks.1.attn1.to_q", "audio_embeddings_connector.transformer_1d_blocks.0.attn1.to_v")
        shapes = model.model.diffusion_model.state_dict()
        lora = {}
        for number, key in enumerate(keys):
            rows, columns = shapes[f"{key}.weight"].shape
            lora[f"diffusion_model.{key}.lora_up.weight"] = randn(number, rows, 2)
            lora[f"diffusion_model.{key}.lora_down.weight"] = randn(number + 9, 2, columns)
        return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]
    return model


def sample(model, name: str, what: str) -> tuple[torch.Tensor, ...]:
    extras, mask = with_guides() if what in ("guides", "guidance") else ({}, None)
    frames, height, width = (10, 12, 12) if what == "image" else (FRAMES, HEIGHT, WIDTH)
    video, sound = randn(1, 1, 128, frames, height, width) / 2, randn(2, 1, 8, SOUND, 16) / 2
    latent = video if what == "video alone" else comfy.nested_tensor.NestedTensor((video, sound))
    if what == "image":  # the first frame is given, as by LTXVImgToVideoInplace
        mask = torch.ones_like(video)
        mask[:, :, 0] = 0.3
    if mask is not None:
        of_sound = torch.linspace(0.3, 1, SOUND).view(1, 1, -1, 1).expand_as(sound)
        mask = comfy.nested_tensor.NestedTensor((mask.expand_as(video), of_sound))
    model = guided(model, what)
    guider = nodes_lt.Guider_LTXAVDualCFG(model)
    guider.set_conds(*conditionings(name, extras))
    guider.set_cfg(2.0, 3.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 3)
    noise = comfy.sample.prepare_noise(latent, 7)
    found = guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, denoise_mask=mask, seed=7)
    return tuple(found.unbind()) if found.is_nested else (found,)


def native(name: str, what: str, expected: dict) -> dict:
    path = BASE / "models" / "diffusion_models" / f"{name}.safetensors"
    model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})
    expected[what] = found = sample(model, name, what)
    return {"largest": float(max(part.abs().max() for part in found))}


def compare(name: str, what: str, make, expected: tuple[torch.Tensor, ...]) -> dict:
    model = make(f"{name}.safetensors")
    found = sample(model, name, what)
    assert [part.shape for part in found] == [part.shape for part in expected]
    pipefusion = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
    return {
        "difference": max(difference(a, b) for a, b in zip(expected, found, strict=True)),
        "whole because": [wrapper.last.reason for wrapper in pipefusion],
    }


def main(results: Results, name: str) -> None:
    expected = {}
    for what in ("dual cfg", "guides", "guidance", "video alone", "lora", "image"):
        results.case(f"{what}, native", partial(native, name, what, expected))
    tried = {
        "one rank": ("guides", "guidance", "video alone", "lora"),
        "all warm-up": ("dual cfg", "guides"),
        "ulysses": ("guides",),
    }
    for mode, whats in tried.items():
        for what in whats:
            results.case(f"{what}, {mode}", partial(compare, name, what, MODES[mode], expected[what]))
    own = {
        "stages": ("lora", "guides"),
        "ulysses": ("video alone", "guidance"),
        "all warm-up": ("image", "guidance"),
    }
    for mode, what in ((mode, what) for mode, whats in own.items() for what in whats):
        make = partial(by_own_class, MODES.get(mode, parallel))
        results.case(f"{what}, own class by {mode}", partial(compare, name, what, make, expected[what]))
