"""LTX-2's MODEL against ComfyUI's own for the same file, under LTX-2's own guiders and guidance. Run by serve.py."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import comfy.nested_tensor
import comfy.sample
from boot import MODELS, Results, comfy, difference, native_model, node, parallel, sequence, torch, whole_because
from comfy_extras import nodes_lt
from safetensors.torch import load_file, save_file
from small_models import prompts

MODES = {
    "stages": parallel,
    "all warm-up": lambda file: node("ApplyPipeFusion", parallel(file, stage_split="even"), 2, 1000, True),
    "ulysses": lambda file: parallel(file, pipe=1, config=sequence(ulysses=2)),
}
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


def sample(model, name: str, what: str) -> tuple[torch.Tensor, ...]:
    extras, mask = with_guides() if what in ("guides", "guidance") else ({}, None)
    frames, height, width = (10, 12, 12) if what == "image" else (FRAMES, HEIGHT, WIDTH)
    video, sound = randn(1, 1, 128, frames, height, width) / 2, randn(2, 1, 8, SOUND, 16) / 2
    latent = comfy.nested_tensor.NestedTensor((video, sound))
    if what == "image":  # the first frame is given, as by LTXVImgToVideoInplace
        mask = torch.ones_like(video)
        mask[:, :, 0] = 0.3
    if mask is not None:
        of_sound = torch.linspace(0.3, 1, SOUND).view(1, 1, -1, 1).expand_as(sound)
        mask = comfy.nested_tensor.NestedTensor((mask.expand_as(video), of_sound))
    if what == "guidance":
        model = nodes_lt.LTXVSpatioTemporalGuidance.execute(model, 0.7, "1", 0.0, 1.0).args[0]
        model = nodes_lt.LTXVModalityGuidance.execute(model, 2.0, 0.0, 1.0).args[0]
    guider = nodes_lt.Guider_LTXAVDualCFG(model)
    guider.set_conds(*conditionings(name, extras))
    guider.set_cfg(2.0, 3.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 3)
    noise = comfy.sample.prepare_noise(latent, 7)
    found = guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, denoise_mask=mask, seed=7)
    return tuple(found.unbind())


def main(results: Results, name: str, cases: Sequence[tuple[str, str]]) -> None:
    for what, mode in cases:
        file, expected = f"{name}-fp8.safetensors" if "fp8" in what else f"{name}.safetensors", []

        def native(file=file, what=what, expected=expected) -> dict:
            model = native_model(file)
            expected.extend(sample(model, name, what))
            return {"largest": float(max(part.abs().max() for part in expected))}

        def compare(file=file, what=what, mode=mode, expected=expected) -> dict:
            model = MODES[mode](file)
            pairs = zip(expected, sample(model, name, what), strict=True)
            return {
                "difference": max(difference(a, b) for a, b in pairs),
                "whole because": whole_because(model),
            }

        results.case(f"{what}, native", native)
        results.case(f"{what}, {mode}", compare)
    results.case("wrapper", partial(wrapped, name))
    results.case("lost header", partial(lost_header, name))


def wrapped(name: str) -> None:
    model = parallel(f"{name}.safetensors")
    kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
    model.add_wrapper(kind, lambda run, *arguments, **named: run(*arguments, **named))
    sample(model, name, "dual cfg")


def lost_header(name: str) -> None:
    save_file(load_file(MODELS / f"{name}.safetensors"), MODELS / "lost.safetensors")
    parallel("lost.safetensors")
