"""LTX-2's files as people have them, against ComfyUI's own MODEL, CLIP and VAE of the same file. Run by serve.py.

The test process has put the all-in-one file without its VAE into models/checkpoints, and the others into
models/diffusion_models. The VAE is of ComfyUI's own class.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from boot import BASE, Results, comfy, difference, outputs_of, parallel, sequence, torch
from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
from ltx2 import sample
from safetensors import safe_open
from safetensors.torch import load_file, save_file

VAE = {
    "dims": 3,
    "latent_channels": 128,
    "encoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all_res", {"multiplier": 2}]],
    "decoder_blocks": [*[["compress_all", {"residual": True, "multiplier": 2}]] * 3, ["res_x", {"num_layers": 1}]],
    "encoder_base_channels": 8,
    "decoder_base_channels": 8,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
}
MODES = {
    "one rank": {"pipe": 1, "devices": "cpu"},
    "pipe 2": {},
    "ulysses 2": {"pipe": 1, "config": sequence(ulysses=2)},
    "tensor 2": {"pipe": 1, "tensor": 2},
}


def all_in_one(file: str, pipe: int = 2, tensor: int = 1, devices: str = "cpu,cpu", config: Any = None) -> tuple:
    """Parallel Checkpoint Loader's MODEL in fp32, CLIP and VAE."""
    return outputs_of("ParallelCheckpointLoader", file, "fp32", pipe, tensor, 1, devices, config)


def add_vae(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()["config"]) | {"vae": VAE}
        metadata = file.metadata() | {"config": json.dumps(said)}
    generator, state = torch.Generator().manual_seed(0), {}
    for key, value in VideoVAE(config=VAE).state_dict().items():
        values = torch.randn(value.shape, generator=generator) / value[:1].numel() ** 0.5
        state[f"vae.{key}"] = values if value.ndim > 1 else 1 + values / 10
    save_file(load_file(path) | state, path, metadata)


def distance(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> float:
    """Relative (L2), of video and sound together."""
    a, b = (torch.cat([part.flatten() for part in parts]) for parts in (a, b))
    return float((a - b).norm() / b.norm())


def whole_file(results: Results, name: str, modes: list[str]) -> None:
    path, native = BASE / "models" / "checkpoints" / f"{name}.safetensors", {}
    add_vae(path)

    def load() -> dict:
        model, clip, native["vae"], _ = comfy.sd.load_checkpoint_guess_config(
            str(path), model_options={"dtype": torch.float32}
        )
        native["samples"] = found = sample(model, name, "dual cfg")
        return {"largest": float(min(part.abs().max() for part in found)), "clip": clip is None}

    def compare(mode: str) -> dict:
        model, clip, vae = all_in_one(path.name, **MODES[mode])
        latent = torch.randn(1, 128, 2, 2, 2, generator=torch.Generator().manual_seed(1))
        ours, theirs = vae.decode(latent), native["vae"].decode(latent)
        found = sample(model, name, "dual cfg")
        return {
            "difference": max(difference(a, b) for a, b in zip(native["samples"], found, strict=True)),
            "clip": clip is None,
            "picture": difference(ours, theirs),
            "spread": float(ours.std()),
        }

    results.case("all in one, native", load)
    for mode in modes:
        results.case(f"all in one, {mode}", partial(compare, mode))


def int8(results: Results, name: str, modes: list[str]) -> None:
    def native(file: str) -> tuple[torch.Tensor, ...]:
        path = str(BASE / "models" / "diffusion_models" / file)
        return sample(comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32}), name, "dual cfg")

    def compare(make: Callable[[], tuple[torch.Tensor, ...]]) -> dict[str, float]:
        found = make()
        return {"from plain": distance(found, plain), "from native": distance(found, expected)}

    file = f"{name}-int8.safetensors"
    with torch.inference_mode():
        plain, expected = native(f"{name}.safetensors"), native(file)
    results.case("int8, native", lambda: compare(lambda: expected))
    for mode in modes:
        results.case(f"int8, {mode}", partial(compare, lambda m=mode: sample(parallel(file, **MODES[m]), name, "dual cfg")))


def main(results: Results, wanted: dict[str, list[str]], names: dict[str, str]) -> None:
    """`wanted`, `names`: "all in one", "int8" -> some of MODES; -> the model."""
    for kind, run in (("all in one", whole_file), ("int8", int8)):
        if wanted[kind]:
            run(results, names[kind], wanted[kind])
