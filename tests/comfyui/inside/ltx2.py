"""LTX-2's MODEL against ComfyUI's own for the same file, under LTX-2's own guiders and guidance. Run by serve.py."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.nested_tensor
import comfy.sample
from boot import BASE, Results, comfy, difference, parallel, torch
from comfy_extras import nodes_lt
from families import MODES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import prompts, write

NAME = "ltx-2.3"
MODELS = BASE / "models" / "diffusion_models"
FRAMES, HEIGHT, WIDTH, SOUND = 6, 4, 4, 11


def conditionings(name: str, extras: dict[str, Any]) -> tuple[list, list]:
    return tuple([[text, known | extras]] for ((text, known),) in prompts(name))


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


def with_prompt_table() -> tuple[str, str]:
    """A file whose prompt is modulated by a table alone, as in 2.5, and what ComfyUI gets in its place, since the class of
    0.33 fails on it: the layer that adds to the table gives 0."""
    path, files = MODELS / f"{NAME}.safetensors", ("table-native.safetensors", "table.safetensors")
    with safe_open(path, "pt") as file:
        stated = json.loads(file.metadata()["config"])["transformer"]
    state, layer = load_file(path), "prompt_adaln_single."
    zeros = {key: torch.zeros_like(value) for key, value in state.items() if layer in key}
    left = {key: value for key, value in state.items() if layer not in key}
    for name, tensors, by_time in zip(files, (left | zeros, left), (True, False), strict=True):
        config = json.dumps({"transformer": stated | {"use_prompt_adaln_single": by_time}})
        save_file(tensors, MODELS / name, {"config": config})
    return files


def native(file: str, what: str, expected: dict) -> dict:
    model = comfy.sd.load_diffusion_model(str(MODELS / file), model_options={"dtype": torch.float32})
    expected[what] = found = sample(model, NAME, what)
    return {"largest": float(max(part.abs().max() for part in found))}


def compare(file: str, what: str, make, expected: dict) -> dict:
    model = make(file)
    found = sample(model, NAME, what)
    assert [part.shape for part in found] == [part.shape for part in expected[what]]
    pipefusion = model.get_all_wrappers(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE)
    return {
        "difference": max(difference(a, b) for a, b in zip(expected[what], found, strict=True)),
        "whole because": [wrapper.last.reason for wrapper in pipefusion],
    }


def wrapped() -> None:
    model = parallel(f"{NAME}.safetensors")
    kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    model.add_wrapper(kind, lambda run, *arguments, **named: run(*arguments, **named))
    sample(model, NAME, "dual cfg")


def lost_header() -> None:
    save_file(load_file(MODELS / f"{NAME}.safetensors"), MODELS / "lost.safetensors")
    parallel("lost.safetensors")


def main(results: Results, tried: Sequence[tuple[str, str]]) -> None:
    write(NAME)
    modes, expected = {"stages": parallel} | MODES, {}
    for what in dict.fromkeys(what for what, _ in tried):
        theirs, ours = with_prompt_table() if what == "table" else (f"{NAME}.safetensors",) * 2
        results.case(f"{what}, native", partial(native, theirs, what, expected))
        for mode in (mode for each, mode in tried if each == what):
            results.case(f"{what}, {mode}", partial(compare, ours, what, modes[mode], expected))
    results.case("wrapper", wrapped)
    results.case("lost header", lost_header)
