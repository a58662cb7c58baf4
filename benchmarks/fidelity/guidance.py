"""How far PipeFusion is from one rank under guidance nodes and guiders, on the trained mini model, and how far fewer steps.

    python -m benchmarks.fidelity.guidance --images 12 --out benchmarks/results/guidance_NAME_DATE.json
    python -m benchmarks.fidelity.guidance --packs FOLDER --only "Skimmed CFG,Regional CFG"

Nodes as a workflow has them, in a ComfyUI (tests/comfyui/inside/guidance_pictures.py): euler, one warm-up step. For each,
the digits read, and the PSNR to the same node with every call whole (decoded pictures in 0..1, mean over pictures) of
PipeFusion with M bands and of one rank with steps dropped to the time predicted for PipeFusion on two stages, rounded up. A
row "one rank" has the PSNR of a run without the node, which says how much the node does.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.fidelity.quality import same_time_steps
from benchmarks.harness import mini_model as mini
from parallel_backend.quickstart.codec import decode
from scripts.comfyui_server import find_python
from tests.comfyui import test_guidance_in_bands as tables
from tests.comfyui.conftest import ComfyUI, Inside

NONE = "none"
ELSEWHERE = (
    *("Video Linear CFG", "Video Triangle CFG", "LTXV Modality Guidance", "LTXV Reference Audio", "LTXV STG"),
    "Perturbed Attention",
)
"""Nodes for other models, that do nothing on this one."""


def main() -> None:
    parser = mini.parser(__doc__, 12)
    parser.add_argument("--steps", type=mini.numbers(int), default=[20])
    parser.add_argument("--bands", type=mini.numbers(int), default=[4])
    parser.add_argument("--packs", type=Path)
    parser.add_argument("--only", type=mini.numbers(str), default=[])
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options = parser.parse_args()
    symbols, noise = mini.requests(options.images)
    names = [*tables.PIXEL_WISE, *tables.WHOLE]
    if options.packs is not None:
        names += [*tables.PACKS_PIXEL_WISE, *tables.PACKS_WHOLE]
    names = [name for name in names if name not in ELSEWHERE and (not options.only or name in options.only)]
    report = mini.Report(options)
    checkout = options.comfyui.resolve()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        save_file({str(index): each.clone() for index, each in enumerate(noise.split(1))}, base / "noise.safetensors")
        inside = Inside(ComfyUI(checkout, find_python(checkout)), base)
        without: dict[int, torch.Tensor] = {}
        for name in (NONE, *names):
            runs = {}
            for steps in options.steps:
                fewer = {max(same_time_steps(steps, 2, bands)) for bands in options.bands}
                runs[steps] = [(steps, 0), *((steps, bands) for bands in options.bands), *((count, 0) for count in fewer)]
            inside.run(
                "guidance_pictures",
                name=name,
                runs=[run for each in runs.values() for run in each],
                prompts=["".join(map(str, own)) for own in symbols.tolist()],
                noise=str(base / "noise.safetensors"),
                out=str(base / "out.safetensors"),
                cfg=options.cfg,
                packs=None if options.packs is None or name not in _of_packs() else str(options.packs),
            )
            made = {key: decode(latents) for key, latents in load_file(base / "out.safetensors").items()}
            for steps, each in runs.items():
                exact = made[f"{steps} 0"]
                without.setdefault(steps, exact)
                for count, bands in each:
                    mode = f"M={bands}" if bands else "one rank" if count == steps else f"one rank, {count} steps instead"
                    to = without[steps] if mode == "one rank" else exact
                    images = made[f"{count} {bands}"]
                    report({"steps": steps, "node": name, "mode": mode, **mini.judge(images, to, symbols)})
        inside.close()


def _of_packs() -> tuple[str, ...]:
    return tables.PACKS_PIXEL_WISE + tables.PACKS_WHOLE


if __name__ == "__main__":
    main()
