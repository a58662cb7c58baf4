"""Wan Animate's MODEL against ComfyUI's own: LoRAs, a file in fp8, no faces, and what is refused. Run by serve.py."""

from functools import partial
from typing import Any

from boot import BASE, Results, comfy, difference, ksampler, parallel, torch
from safetensors.torch import load_file, save_file
from small_cases import detecting
from small_models import detected, latent, prompts, write

NAME, FP8 = "wan-2.2-animate", "wan-2.2-animate-fp8"
MODELS = BASE / "models" / "diffusion_models"
OF_BLOCKS = ("blocks.1.self_attn.q", "face_adapter.fuser_blocks.1.linear1_kv")
HERE = "face_encoder.out_proj"


def patches(model, *layers: str) -> dict[str, torch.Tensor]:
    """A LoRA of these layers."""
    shapes, lora = model.model.diffusion_model.state_dict(), {}
    for number, layer in enumerate(layers):
        g = torch.Generator().manual_seed(number)
        rows, columns = shapes[f"{layer}.weight"].shape
        lora[f"diffusion_model.{layer}.lora_up.weight"] = torch.randn(rows, 2, generator=g) / 8
        lora[f"diffusion_model.{layer}.lora_down.weight"] = torch.randn(2, columns, generator=g) / 8
    return lora


def with_lora(model, *layers: str):
    return comfy.sd.load_lora_for_models(model, None, patches(model, *layers), 1.0, 0.0)[0]


def sample(model, **others: Any) -> torch.Tensor:
    """`others`: entries of the conditioning in place of its own."""
    given = [[[text, more | others]] for ((text, more),) in prompts(NAME)]
    return ksampler(model, given, latent(NAME), steps=2)


def native(file: str):
    return comfy.sd.load_diffusion_model(str(MODELS / f"{file}.safetensors"), model_options={"dtype": torch.float32})


def to_fp8() -> None:
    """Matrices of blocks, and of a layer that ComfyUI's process runs, in fp8."""
    state = load_file(MODELS / f"{NAME}.safetensors")
    for key, value in state.items():
        if value.ndim == 2 and key.startswith(("blocks.", "face_adapter.", HERE)):
            state[key] = value.to(torch.float8_e4m3fn)
    save_file(state, MODELS / f"{FP8}.safetensors")


def compare(expected: torch.Tensor, found: torch.Tensor) -> float:
    return difference(expected, found) / float(expected.abs().max())


def with_loras(plain: torch.Tensor, **mode: int) -> dict[str, float]:
    layers = *OF_BLOCKS, HERE
    expected, of_blocks = (sample(with_lora(native(NAME), *each)) for each in (layers, OF_BLOCKS))
    moved = min(compare(one, other) for one, other in ((plain, of_blocks), (of_blocks, expected)))
    return {"share": compare(expected, sample(with_lora(parallel(f"{NAME}.safetensors", **mode), *layers))), "moved": moved}


def without_faces() -> dict[str, float]:
    models = native(NAME), parallel(f"{NAME}.safetensors")
    return {"share": compare(*(sample(model, face_video_pixels=None) for model in models))}


def hooked() -> None:
    model = parallel(f"{NAME}.safetensors")
    model.add_hook_patches(object(), {f"diffusion_model.{HERE}.weight": (torch.zeros(1),)})


def skipped() -> None:
    from comfy_extras import nodes_slg  # once ComfyUI is up

    sample(nodes_slg.SkipLayerGuidanceDiT.execute(parallel(f"{NAME}.safetensors"), 3.0, 0.0, 1.0, "1").args[0])


def main(results: Results) -> None:
    with detecting(detected(NAME)):
        write(NAME)
        to_fp8()
        plain = sample(native(NAME))
        results.case("LoRA, stages", partial(with_loras, plain))
        results.case("LoRA, tensor", partial(with_loras, plain, pipe=1, tensor=2))
        results.case("fp8", lambda: {"share": compare(sample(native(FP8)), sample(parallel(f"{FP8}.safetensors")))})
        results.case("no faces", without_faces)
        results.case("hook", hooked)
        results.case("skipped blocks", skipped)
        small = torch.zeros(1, 3, 1, 8, 9)
        results.case("small faces", lambda: sample(parallel(f"{NAME}.safetensors"), face_video_pixels=small))
