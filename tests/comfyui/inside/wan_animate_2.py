"""Wan Animate 2's MODEL against ComfyUI's own: LoRAs, fp8, calls without some of its conditioning, and what is refused. Run
by serve.py."""

from functools import partial
from typing import Any

from boot import Results, comfy, ksampler, parallel, sequence, torch
from safetensors.torch import load_file, save_file
from small_cases import detecting
from small_models import detected, latent, prompts, write
from wan_animate import MODELS, compare, native, with_lora

NAME, FP8 = "wan-animate-2", "wan-animate-2-fp8"
LAYERS = "blocks.1.self_attn.q", "blocks.0.cross_attn.k_img"
POSE = "pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength"
"""Entries of the conditioning for the pose."""
USUAL = "clip_vision_output", "clip_vision_output_pose", "cross_attn_pose", "pose_strength", "reference_strength"
"""Entries that a call can lack."""


def given(without: tuple[str, ...] = (), **others: Any) -> list:
    """The conditioning without these entries. `others`: entries in place of its own."""
    return [
        [[text, {name: value for name, value in (more | others).items() if name not in without}]]
        for ((text, more),) in prompts(NAME)
    ]


def in_some_steps() -> list:
    """As the node gives it for a pose in the first half of the sampling."""
    first, second = {"end_percent": 0.5}, {"start_percent": 0.5}
    return [
        [[text, more | first], [text, without | second]]
        for ((text, more),), ((_, without),) in zip(given(), given(POSE), strict=True)
    ]


def to_fp8() -> None:
    state = load_file(path := MODELS / f"{NAME}.safetensors")
    metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)[1]
    for key, value in state.items():
        if value.ndim == 2 and key.startswith("blocks."):
            state[key] = value.to(torch.float8_e4m3fn)
    save_file(state, MODELS / f"{FP8}.safetensors", metadata)


def sample(model, conditioning: list) -> torch.Tensor:
    return ksampler(model, conditioning, latent(NAME), steps=2)


def equal(conditioning: list, file: str = NAME, **mode: Any) -> dict[str, float]:
    return {
        "share": compare(sample(native(file), conditioning), sample(parallel(f"{file}.safetensors", **mode), conditioning))
    }


def with_loras(**mode: int) -> dict[str, float]:
    plain, expected = sample(native(NAME), given()), sample(with_lora(native(NAME), *LAYERS), given())
    found = sample(with_lora(parallel(f"{NAME}.safetensors", **mode), *LAYERS), given())
    return {"share": compare(expected, found), "moved": compare(plain, expected)}


def cached() -> dict[str, float]:
    from comfy_extras import nodes_wan  # once ComfyUI is up

    model = nodes_wan.WanAnimate2Cache.execute(parallel(f"{NAME}.safetensors"), "cpu").args[0]
    return {"share": compare(sample(native(NAME), given()), sample(model, given()))}


def skipped() -> None:
    from comfy_extras import nodes_slg  # once ComfyUI is up

    sample(nodes_slg.SkipLayerGuidanceDiT.execute(parallel(f"{NAME}.safetensors"), 3.0, 0.0, 1.0, "1").args[0], given())


def main(results: Results) -> None:
    with detecting(detected(NAME)):
        write(NAME)
        to_fp8()
        ulysses: dict[str, Any] = {"pipe": 1, "config": sequence(ulysses=2)}
        results.case("LoRA, stages", with_loras)
        results.case("LoRA, tensor", partial(with_loras, pipe=1, tensor=2))
        results.case("fp8", partial(equal, given(), FP8, pipe=1, tensor=2))
        results.case("no pose", partial(equal, given(POSE), **ulysses))
        results.case("a pose in some steps", partial(equal, in_some_steps(), **ulysses))
        results.case("the pose alone", partial(equal, given(USUAL), **ulysses))
        results.case("WanAnimate2Cache", cached)
        results.case("skipped blocks", skipped)
        other = torch.zeros(1, 16, 4, 8, 6)
        results.case("other frames", lambda: sample(parallel(f"{NAME}.safetensors"), given(pose_video_latent=other)))
