"""What nodes do to a MODEL that ComfyUI's own class computes on ranks, beside ComfyUI's own MODEL. Run by serve.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import comfy.controlnet
from block_patches import extra, load_extras
from boot import BASE, Results, by_own_class, comfy, difference, ksampler, node, parallel, sequence, torch
from comfy.ldm.modules import attention
from families import detecting, read
from own_class import AURA, write
from safetensors.torch import save_file

MODES = {
    "stages": {"pipe": 2},
    "ulysses": {"pipe": 1, "config": sequence(ulysses=2)},
    "tensor": {"pipe": 1, "tensor": 2},
}
SLG = {"double_layers": "1", "single_layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}
NAG = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}
ROPE = {"scale_x": 1.5, "shift_x": 0.0, "scale_y": 1.2, "shift_y": 0.5, "scale_t": 1.0, "shift_t": 0.0}
EASY_CACHE = {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}


class Control(comfy.controlnet.ControlBase):
    """A ControlNet whose residuals are for the first two blocks, of a token of the latent's channels."""

    def get_control(self, x_noisy, *_others):
        return {"input": [torch.ones(len(x_noisy), 1, x_noisy.shape[1])] * 2}

    def copy(self):
        return self


@dataclass
class Feature:
    """What a graph does: to the MODEL, to the prompts, to ours alone, and to the sampler."""

    change: Callable[[Any], Any] = lambda model: model
    prompts: Callable[[], list] | None = None
    ours: Callable[[Any], Any] = lambda model: model
    sampling: dict[str, Any] = field(default_factory=dict)


def main(results: Results, wanted: dict[str, list[str]], quantised: dict[str, dict[str, list[str]]]) -> None:
    """`wanted`: model -> cases "feature, mode". `quantised`: model -> format -> its file, and ComfyUI's for the same."""
    from comfy.ldm.aura.mmdit import MMDiT

    load_extras("nodes_hooks", "nodes_lora_debug", "nodes_slg", "nodes_nag", "nodes_rope", "nodes_easycache")
    for name, cases in wanted.items():
        if name == "aura":
            write(MMDiT, AURA, "aura.safetensors")
            g = torch.Generator().manual_seed(0)
            texts = [[[torch.randn(1, 9, 2048, generator=g), {}]] for _ in range(2)]
            latent, settings = torch.zeros(1, 4, 16, 24), {"cfg": 3.0, "scheduler": "simple", "detected": AURA}
        else:
            *texts, latent, settings = read(name)
        with detecting(settings["detected"]):
            of_model(results, name, texts, latent, settings, cases, quantised[name])


def of_model(
    results: Results,
    name: str,
    texts: list,
    latent: torch.Tensor,
    settings: dict,
    cases: list[str],
    files: dict[str, list[str]],
) -> None:
    def native_of(file: str):
        path = BASE / "models" / "diffusion_models" / file
        return comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})

    def sample(model, prompts: list = texts, **more: Any) -> torch.Tensor:
        return ksampler(model, prompts, latent, cfg=settings["cfg"], scheduler=settings["scheduler"], **{"steps": 2} | more)

    native = native_of(f"{name}.safetensors")
    features = features_of(texts, latent, [lora(native, name, seed) for seed in (3, 4)])
    expected: dict[str, torch.Tensor] = {}

    def compare(feature: str, mode: str) -> dict[str, float]:
        """The largest difference, and what the feature does, as shares of the latents' largest value."""
        does = features.get(feature, Feature())
        prompts = does.prompts or (lambda: texts)
        file, native_file = files.get(feature, [f"{name}.safetensors"] * 2)
        ours = by_own_class(parallel, file, **MODES[mode])
        found = sample(does.change(does.ours(ours)), prompts(), **does.sampling)
        if feature not in expected:
            model = native_of(native_file) if feature in files else native
            expected[feature] = sample(does.change(model), prompts(), **does.sampling)
        plain = sample(native, **does.sampling)
        largest = float(plain.abs().max())
        moved = difference(expected[feature], plain) / largest
        return {"share": difference(expected[feature], found) / largest, "moved": moved}

    for case in cases:
        results.case(f"{name}, {case}", partial(compare, *case.rsplit(", ", 1)))


def features_of(texts: list, latent: torch.Tensor, loras: list[str]) -> dict[str, Feature]:
    (positive, negative), (first, second) = texts, loras

    def hooked(text: list, hooks: Any) -> list:
        return node("ConditioningSetProperties", text, 1.0, "default", None, hooks)

    def hook(file: str, strength: float = 1.0) -> Any:
        return node("CreateHookLoraModelOnly", file, strength)

    def scheduled(hooks: Any) -> Any:
        frames = node("CreateHookKeyframe", 0.25, 0.5, node("CreateHookKeyframe", 1.0, 0.0))
        return node("SetHookKeyframes", hooks, frames)

    def attending(model: Any) -> Any:
        clone = model.clone()
        options = clone.model_options["transformer_options"]
        options["optimized_attention_override"] = lambda _usual, *given, **named: attention.attention_pytorch(
            *given, **named
        )
        return clone

    half = latent.shape[-1] // 2
    mask = torch.zeros(1, *latent.shape[-2:])
    mask[..., :half] = 1.0

    def region(of_positive: list) -> list:
        """A prompt for a part of the latent beside one for all of it."""
        return [of_positive + negative, negative]

    return {
        "LoRA": Feature(partial(node, "LoraLoaderModelOnly", lora_name=first, strength_model=0.7)),
        "LoRA in bypass mode": Feature(partial(node, "LoraLoaderBypassModelOnly", lora_name=first, strength_model=0.7)),
        "LoRA hooks": Feature(prompts=lambda: [hooked(positive, hook(first)), hooked(negative, hook(second, 0.7))]),
        "LoRA hooks with keyframes": Feature(prompts=lambda: [hooked(positive, scheduled(hook(first))), negative]),
        "mask of a prompt": Feature(prompts=lambda: region(node("ConditioningSetMask", positive, mask, 1.0, "default"))),
        "area of a prompt": Feature(
            prompts=lambda: region(node("ConditioningSetArea", positive, 8 * half, 8 * half, 0, 0, 1.0))
        ),
        "rotary options": Feature(partial(extra, "ScaleROPE", **ROPE)),
        "EasyCache": Feature(partial(extra, "EasyCache", **EASY_CACHE), sampling={"steps": 6}),
        "step cache, threshold 0": Feature(ours=lambda model: node("ParallelStepCache", model, 0.0, 0.0, 1.0)),
        "attention override": Feature(attending),
        "ControlNet": Feature(
            prompts=lambda: [[[text, {**more, "control": Control()}] for text, more in each] for each in texts]
        ),
        "Skip Layer Guidance": Feature(partial(extra, "SkipLayerGuidanceDiT", **SLG)),
        "NAG": Feature(partial(extra, "NAGuidance", **NAG)),
    }


def lora(native: Any, name: str, seed: int) -> str:
    """A LoRA file for each third matrix."""
    state, g = native.model.diffusion_model.state_dict(), torch.Generator().manual_seed(seed)
    tensors = {}
    for key in [key for key, value in state.items() if value.ndim == 2 and key.endswith("weight")][::3]:
        out, into = state[key].shape
        layer = f"diffusion_model.{key.removesuffix('.weight')}"
        tensors[f"{layer}.lora_up.weight"] = 0.3 * torch.randn(out, 4, generator=g)
        tensors[f"{layer}.lora_down.weight"] = torch.randn(4, into, generator=g) / math.sqrt(into)
    save_file(tensors, BASE / "models" / "loras" / f"{name} {seed}.safetensors")
    return f"{name} {seed}.safetensors"
