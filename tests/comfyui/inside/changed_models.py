"""Models whose nodes give more than a prompt: calls without some of it, what is refused. Against ComfyUI's own MODEL. Run by
serve.py.
"""

from functools import partial
from typing import Any

from block_patches import load_extras
from boot import Results, difference, ksampler, native_model, outputs_of, parallel, sequence, torch
from small_cases import small
from small_models import latent, prompts

ANIMATE, ANIMATE_2, SEEDVR2, SEEDVR2_7B = "wan-2.2-animate", "wan-animate-2", "seedvr2-3b", "seedvr2-7b"
POSE = ("pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength")
USUAL = ("clip_vision_output", *POSE[1:], "reference_strength")
"""Entries of Wan Animate 2's conditioning for the pose, and those that a call can lack beside it."""
ULYSSES: dict[str, Any] = {"pipe": 1, "config": sequence(ulysses=2)}


def given(name: str, without: tuple[str, ...] = (), **others: Any) -> list:
    """The conditioning without these entries. `others`: entries in place of its own."""
    return [
        [[text, {key: value for key, value in (more | others).items() if key not in without}]]
        for ((text, more),) in prompts(name)
    ]


def sample(model: Any, name: str, texts: list | None = None, videos: int = 1) -> torch.Tensor:
    """SeedVR2's own node gives its prompts, from texts in the model's file."""
    noise = torch.cat([latent(name)[..., :20, :28]] * videos)
    if name.startswith("seedvr2") and texts is None:
        video = torch.randn(noise.shape, generator=torch.Generator().manual_seed(2))
        texts = outputs_of("SeedVR2Conditioning", model, {"samples": video})
    return ksampler(model, given(name) if texts is None else texts, noise, steps=2)


def share(expected: torch.Tensor, found: torch.Tensor) -> float:
    return difference(expected, found) / float(expected.abs().max())


def equal(name: str, texts: list | None = None, videos: int = 1, **mode: Any) -> dict[str, float]:
    models = native_model(f"{name}.safetensors"), parallel(f"{name}.safetensors", **mode)
    return {"share": share(*(sample(model, name, texts, videos) for model in models))}


def skipped(name: str) -> None:
    from comfy_extras import nodes_slg  # once ComfyUI is up

    model = parallel(f"{name}.safetensors")
    sample(nodes_slg.SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "1").args[0], name)


def hooked() -> None:
    model = parallel(f"{ANIMATE}.safetensors")
    model.add_hook_patches(object(), {"diffusion_model.face_encoder.out_proj.weight": (torch.zeros(1),)})


def cached() -> dict[str, float]:
    from comfy_extras import nodes_wan  # once ComfyUI is up

    file = f"{ANIMATE_2}.safetensors"
    model = nodes_wan.WanAnimate2Cache.execute(parallel(file), "cpu").args[0]
    return {"share": share(sample(native_model(file), ANIMATE_2), sample(model, ANIMATE_2))}


def in_some_steps() -> list:
    """As the node gives it for a pose in the first half of the sampling."""
    first, second = {"end_percent": 0.5}, {"start_percent": 0.5}
    return [
        [[text, more | first], [text, without | second]]
        for ((text, more),), ((_, without),) in zip(given(ANIMATE_2), given(ANIMATE_2, POSE), strict=True)
    ]


def texts_of_node() -> dict[str, float]:
    """What SeedVR2's node reads off both MODELs."""
    video, file = {"samples": latent(SEEDVR2)}, f"{SEEDVR2}.safetensors"
    both = (outputs_of("SeedVR2Conditioning", model, video) for model in (native_model(file), parallel(file)))
    return {"share": max(difference(own[0][0], ours[0][0]) for own, ours in zip(*both, strict=True))}


def refused(name: str, texts: list) -> None:
    sample(parallel(f"{name}.safetensors"), name, texts)


MORE = {
    ANIMATE: {
        "no faces": lambda: equal(ANIMATE, given(ANIMATE, face_video_pixels=None)),
        "hook": hooked,
        "skipped blocks": partial(skipped, ANIMATE),
        "small faces": lambda: refused(ANIMATE, given(ANIMATE, face_video_pixels=torch.zeros(1, 3, 1, 8, 9))),
    },
    ANIMATE_2: {
        "no pose": lambda: equal(ANIMATE_2, given(ANIMATE_2, POSE), **ULYSSES),
        "a pose in some steps": lambda: equal(ANIMATE_2, in_some_steps(), **ULYSSES),
        "the pose alone": lambda: equal(ANIMATE_2, given(ANIMATE_2, USUAL), **ULYSSES),
        "WanAnimate2Cache": cached,
        "skipped blocks": partial(skipped, ANIMATE_2),
        "other frames": lambda: refused(ANIMATE_2, given(ANIMATE_2, pose_video_latent=torch.zeros(1, 16, 4, 8, 6))),
    },
    SEEDVR2: {
        "texts": texts_of_node,
        "no video": lambda: refused(SEEDVR2, [[[torch.zeros(1, 9, 5120), {}]]] * 2),
    },
    # ComfyUI's class of 3 B gives all videos the first one's words.
    SEEDVR2_7B: {"two videos": lambda: equal(SEEDVR2_7B, videos=2, **ULYSSES)},
}


def main(results: Results) -> None:
    load_extras("nodes_seedvr")
    for name, more in MORE.items():
        with small(name):
            for case, run in more.items():
                results.case(f"{name}, {case}", run)
