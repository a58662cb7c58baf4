"""One rank on a GPU against ComfyUI's own MODEL of the same file on the same GPU, with blocks of published models' sizes.

    python -m benchmarks.speed.one_gpu_native --out benchmarks/results/one_gpu_native_NAME_DATE.json

Steps of KSampler (euler, guidance 1, bf16) in turn, as in one_rank_native.py, with both models on the GPU and torch's
attention for both. Of each model a few blocks with random weights: a step of the whole model has as many more as its blocks.
Beside the time, the memory that a rank takes in a call beyond its weights, and what the memory model says of it.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness import measuring
from benchmarks.sizes.real_models import FLUX_DEV, MiniModel
from benchmarks.sizes.trace import predicted
from parallel_backend.client.call import ModelCall
from parallel_backend.client.memory_guard import request_of
from parallel_backend.core.degrees import Degrees
from parallel_backend.processes.pool import Pool
from testing.models import conditioning_of, on_ranks

from .one_rank_native import inside, row

DEVICE = "cuda:0"
FLAGS = ("--use-pytorch-cross-attention", "--disable-dynamic-vram", "--highvram")
CALLS = 3
"""Calls of which the most memory is noted."""


@dataclass(frozen=True)
class Case:
    """So many blocks of each list of a model."""

    name: str
    depths: tuple[int, ...]

    @property
    def real(self) -> MiniModel:
        return FLUX_DEV.with_depths(*self.depths)


CASES = {case.name: case for case in (Case("flux-dev", (4, 8)),)}


def fill(real: MiniModel, path: Path) -> Path:
    """The model's file with random weights, made on the GPU: matrices of deviation 0.02, scales of 1."""
    with real.save(path).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = header.pop("__metadata__", None)
    random = torch.Generator(DEVICE).manual_seed(0)
    state = {}
    for name, entry in header.items():
        made = torch.randn(entry["shape"], generator=random, device=DEVICE, dtype=torch.bfloat16) * 0.02
        state[name] = (made + 1 if len(entry["shape"]) == 1 and not name.endswith("bias") else made).cpu()
    save_file(state, path, metadata)
    torch.cuda.empty_cache()
    return path


@torch.inference_mode()
def memory(path: Path, real: MiniModel) -> dict[str, float]:
    """MB that calls of this model take on a rank beyond its weights, and by the memory model."""
    pool = Pool((DEVICE,))
    try:
        pool.ready.result(timeout=120)
        model = on_ranks(pool, real.opened(path), Degrees(), "bf16", "sdpa", lambda: None)
        noise, tensors = real.noise(), real.tensors()
        for _ in range(CALLS):
            model.predict(ModelCall(noise, torch.full((real.entries,), real.timestep), tensors), lambda: None)
        (stats,) = model.close_run(0, lambda: None)
        patching = model.built.patching
        grid = patching.grid(tuple(noise.shape))
        request = request_of(conditioning_of(model, grid, tensors), model.built, 0, 1)
        need = predicted(real, Degrees(), request)[0][0]
        taken = stats.peak_bytes - sum(model.weight_bytes)
        return {
            "MB": round(taken / 1e6),
            "predicted_MB": round(need.run / 1e6),
            "weights_MB": round(sum(model.weight_bytes) / 1e6),
        }
    finally:
        pool.close()


def run(rounds: int, steps: int, say: Callable[[str], None], checkout: Path, cases: list[Case]) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        folder = base / "models" / "diffusion_models"
        folder.mkdir(parents=True)
        for case in cases:
            real, file = case.real, folder / f"{case.name}.safetensors"
            fill(real, file)
            say(f"{case.name}: {file.stat().st_size / 1e9:.1f} GB")
            call = {"latent": real.latent, "text": real.text, "pooled": real.config.get("pooled_width", 0)}
            with inside(checkout, base, FLAGS) as ask:  # one ComfyUI each, so that its memory is free for the next
                asked = {"file": file.name, "dtype": "bf16", "call": call, "steps": steps, "rounds": rounds}
                made = row(ask(asked | {"device": DEVICE}))
            made |= {"blocks": case.depths, "memory": memory(file, real)}
            file.unlink()
            found[case.name] = made
            say(f"{case.name}: {made}")
    return {
        "what": "one_gpu_native",
        "date": date.today().isoformat(),
        "hardware": measuring.hardware((DEVICE,)),
        "scope": "KSampler's steps behind the first, one rank and ComfyUI's own model of the same file in turn, bf16",
        "steps": steps,
        "rounds": rounds,
        "cases": found,
    }


def main() -> None:
    options: argparse.ArgumentParser = measuring.parser(__doc__)
    options.set_defaults(rounds=4, steps=6)
    options.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help=f"of {', '.join(CASES)}")
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    given = options.parse_args()
    result = run(
        given.rounds, given.steps, measuring.TimedLog(), given.comfyui.resolve(), [CASES[name] for name in given.cases]
    )
    measuring.report(result, given.out)


if __name__ == "__main__":
    main()
