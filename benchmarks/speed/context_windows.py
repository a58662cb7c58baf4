"""Seconds of a run with ComfyUI's context windows on CPU ranks with a thread each: 5 windows a step of a small Wan model.

python -m benchmarks.speed.context_windows --comfyui ~/ComfyUI --out context_windows.json
"""

import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness.comfyui_pictures import SCRIPTS
from benchmarks.harness.measuring import hardware
from benchmarks.one_gpu.kept import keep, parser
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside

DEGREES = {"1 rank": (1, 1), "2 replicas": (1, 2), "2 stages": (2, 1), "4 ranks, 2 x 2": (2, 2)}
"""(pipefusion_degree, split_batch_degree) by name."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options.add_argument("--cfg", type=float, default=1.0)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--ranks", type=int, default=2, help="leave out cases with more")
    given = options.parse_args()
    cases: dict[str, dict[str, Any]] = {}
    for name, (pipe, batch) in DEGREES.items():
        case = {"pipe": pipe, "batch": batch, "devices": ",".join(["cpu"] * pipe * batch), "cfg": given.cfg}
        if pipe * batch <= given.ranks:
            cases |= {name: case | {"together": True}}
            if pipe * batch > 1:
                cases |= {f"{name}, one by one": case | {"together": False}}
    checkout = given.comfyui.resolve()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "models" / "diffusion_models").mkdir(parents=True)
        inside = Inside(ComfyUI(checkout, find_python(checkout)), Path(directory), SCRIPTS)
        found, _ = inside.run("context_windows", cases=cases, steps=given.steps, rounds=given.rounds)
        inside.close()
    rows = {name: [found[f"{name}, round {number}"] for number in range(given.rounds)] for name in cases}
    seconds = {name: statistics.median(each["seconds"] for each in row) for name, row in rows.items()}
    said = ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())
    where = {"date": str(date.today()), "hardware": hardware(), "cfg": given.cfg, "steps": given.steps, "windows": 5}
    keep(given.out, {"summary": said, **where, "rounds": rows})


if __name__ == "__main__":
    main()
