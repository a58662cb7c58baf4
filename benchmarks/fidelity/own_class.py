"""How far PipeFusion's bands are from whole calls on the trained mini models, by ComfyUI's own class and by the family.

    python -m benchmarks.fidelity.own_class --images 20 --out benchmarks/results/fidelity_own_class_NAME_DATE.json

KSampler's way in a ComfyUI, on two stages, one warm-up step. For each model, number of steps and of bands: the PSNR to the
same model's whole run (decoded pictures in 0..1, mean over pictures or videos).
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import mini_model as mini
from benchmarks.harness import mini_video, moving_digits
from parallel_backend.client.sampling import Prompt, digit_prompts
from parallel_backend.quickstart.model import WEIGHTS
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside

SCRIPTS = Path(__file__).resolve().parents[1] / "harness" / "inside"
RENAMED = {"pooled": "pooled_output"}
"""Entry of a family's prompt -> of ComfyUI's conditioning."""


@dataclass(frozen=True)
class Mini:
    """A trained model, and what is asked of it."""

    weights: Path
    requests: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    prompt: Callable[[torch.Tensor, float], Prompt]
    decode: Callable[[torch.Tensor], torch.Tensor]
    cfg: float
    start: float = 1.0


MINIS = {
    "pictures, Flux": Mini(WEIGHTS, mini.requests, digit_prompts, mini.pictures, 3.0),
    "videos, Wan": Mini(
        mini_video.WEIGHTS,
        mini_video.requests,
        mini_video.prompts_of,
        moving_digits.decode,
        2.0,
        mini_video.START,
    ),
}


def main() -> None:
    parser = mini.parser(__doc__, 20)
    parser.add_argument("--steps", type=mini.numbers(int), default=[8])
    parser.add_argument("--bands", type=mini.numbers(int), default=[2, 4])
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options = parser.parse_args()
    checkout, report = options.comfyui.resolve(), mini.Report(options)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        files = base / "models" / "diffusion_models"
        files.mkdir(parents=True)
        inside = Inside(ComfyUI(checkout, find_python(checkout)), base, SCRIPTS)
        runs = [(steps, bands) for steps in options.steps for bands in (0, *options.bands)]
        for name, model in MINIS.items():
            shutil.copy(model.weights, files)
            inputs, out = base / "inputs.safetensors", base / "out.safetensors"
            save_file(_inputs(model, options.images), inputs)
            how = {"inputs": str(inputs), "out": str(out), "runs": runs, "cfg": model.cfg, "start": model.start}
            for own in (False, True):
                inside.run("own_class_pictures", file=model.weights.name, own=own, **how)
                made = {key: model.decode(latents) for key, latents in load_file(out).items()}
                for steps, bands in runs:
                    close = mini.closeness(made[f"{steps} {bands}"], made[f"{steps} 0"])
                    by = "own class" if own else "family"
                    report({"model": name, "by": by, "steps": steps, "bands": bands, **close})
        inside.close()


def _inputs(model: Mini, count: int) -> dict[str, torch.Tensor]:
    symbols, noise = model.requests(count)
    prompt, found = model.prompt(symbols, model.cfg), {"noise": noise.contiguous()}
    for sign in ("positive", "negative"):
        entries = getattr(prompt, sign)
        found |= {f"{sign}.{RENAMED.get(name, name)}": value.contiguous() for name, value in entries.items()}
    return found


if __name__ == "__main__":
    main()
