"""SeedVR2 with its own node, which reads the file's two texts off the MODEL. Run by serve.py."""

from functools import partial
from typing import Any

from block_patches import load_extras
from boot import MODELS, Results, comfy, difference, ksampler, native_model, node, outputs_of, parallel, sequence, torch
from safetensors.torch import load_file, save_file
from small_cases import detecting
from small_models import detected, write

NAME, OTHER = "seedvr2-3b", "seedvr2-7b"
FILE, FP8 = f"{NAME}.safetensors", f"{NAME}-fp8.safetensors"
LATENT = 16, 3, 20, 28
LAYERS = "blocks.1.attn.proj_qkv.txt", "blocks.3.mlp.all.proj_out", "vid_in.proj"
TWO_RANKS = {"pipe": 1, "config": sequence(ulysses=2)}


def sample(model, videos: int = 1, steps: int = 1, cfg: float = 1.0) -> torch.Tensor:
    """Its own node gives both prompts."""
    given = torch.randn(videos, *LATENT, generator=torch.Generator().manual_seed(2))
    prompts = outputs_of("SeedVR2Conditioning", model, {"samples": given})
    return ksampler(model, prompts, torch.zeros(videos, *LATENT), steps=steps, cfg=cfg)


def share(expected: torch.Tensor, found: torch.Tensor) -> float:
    return difference(expected, found) / float(expected.abs().max())


def texts() -> float:
    """Largest difference of what the node reads off both."""
    given = {"samples": torch.zeros(1, *LATENT)}
    pairs = zip(
        *(outputs_of("SeedVR2Conditioning", each, given) for each in (native_model(FILE), parallel(FILE))), strict=True
    )
    return max(difference(own[0][0], ours[0][0]) for own, ours in pairs)


def without_video() -> torch.Tensor:
    text = torch.zeros(1, 9, 5120)
    return ksampler(parallel(FILE), ([[text, {}]], [[text, {}]]), torch.zeros(1, *LATENT), steps=1, cfg=1.0)


def with_lora(model):
    shapes, lora, g = model.model.diffusion_model.state_dict(), {}, torch.Generator().manual_seed(3)
    for layer in LAYERS:
        rows, columns = shapes[f"{layer}.weight"].shape
        lora[f"diffusion_model.{layer}.lora_up.weight"] = torch.randn(rows, 2, generator=g) / 8
        lora[f"diffusion_model.{layer}.lora_down.weight"] = torch.randn(2, columns, generator=g) / 8
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]


def lora(**mode: Any) -> dict[str, float]:
    expected = sample(with_lora(native_model(FILE)))
    moved = share(sample(native_model(FILE)), expected)
    return {"share": share(expected, sample(with_lora(parallel(FILE, **mode)))), "moved": moved}


def fp8(**mode: Any) -> dict[str, float]:
    state = load_file(MODELS / FILE)
    in_fp8 = {key for key, value in state.items() if value.ndim == 2 and key.startswith("blocks.")}
    save_file({key: value.to(torch.float8_e4m3fn) if key in in_fp8 else value for key, value in state.items()}, MODELS / FP8)
    expected = sample(native_model(FP8))
    moved = share(sample(native_model(FILE)), expected)
    return {"share": share(expected, sample(parallel(FP8, **mode))), "moved": moved}


def in_patches() -> float:
    model = node("ApplyPipeFusion", parallel(FILE), 2, 1000, True)
    return share(sample(native_model(FILE), steps=3, cfg=2.0), sample(model, steps=3, cfg=2.0))


def batch(**mode: Any) -> float:
    """Of the kind with 7 B parameters, since ComfyUI's class of 3 B gives all videos the first one's words."""
    file = f"{OTHER}.safetensors"
    return share(sample(native_model(file), videos=2, cfg=2.0), sample(parallel(file, **mode), videos=2, cfg=2.0))


def main(results: Results, full: bool) -> None:
    load_extras("nodes_seedvr")
    with detecting(detected(NAME)):
        write(NAME)
        if not full:
            results.case("texts", texts)
            results.case("one step", lambda: share(sample(native_model(FILE)), sample(parallel(FILE, **TWO_RANKS))))
            results.case("no video", without_video)
            return
        results.case("PipeFusion", in_patches)
        for name, change in (("LoRA", lora), ("fp8", fp8)):
            results.case(f"{name}, stages", change)
            results.case(f"{name}, tensor", partial(change, pipe=1, tensor=2))
    with detecting(detected(OTHER)):
        write(OTHER)
        results.case("batch, ulysses", partial(batch, **TWO_RANKS))
        results.case("batch, split batch", partial(batch, pipe=1, batch=2))
