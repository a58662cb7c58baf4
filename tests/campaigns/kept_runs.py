"""`python -m tests.campaigns.kept_runs [--only PATTERN] [--steps 20] [--out FILE.json]`

Kills a rank, has it hang or run out of memory in a step of a run, in several modes, on 2 and 4 CPU ranks, under three
samplers of ComfyUI: what the run then costs, and how far its samples are from those of a run that loses nothing.
"""

import argparse
import itertools
import re
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from scripts.comfyui_server import find_python
from testing import mini
from testing.comfyui.scripted import ComfyUI, Inside

SCRIPTS = Path(__file__).parents[1] / "comfyui" / "inside"
MODEL, SIZES = "small.safetensors", {"width": 512, "single_blocks": 6}
"""Four heads, and two blocks for each of four stages."""
MODES = ("ulysses", "ring", "tensor", "split batch", "stages", "stages with a LoRA", "pipefusion", "displaced")
SAMPLERS = ("euler", "dpmpp_2m", "uni_pc")
KINDS = ("killed", "hangs", "out of memory")
RANKS = (2, 4)


def runs(steps: int) -> dict[str, tuple[str, int, str, str, int, int]]:
    """By name (mode, ranks, sampler, kind, step, steps): each mode on 2 and 4 ranks with each kind, in turn under each
    sampler and in another step."""
    places = itertools.cycle((steps - 3, 2, steps // 2, steps, 1))
    samplers = itertools.cycle(SAMPLERS)
    chosen: dict[str, tuple[str, int, str, str, int, int]] = {}
    for kind, ranks, mode in itertools.product(KINDS, RANKS, MODES):
        if (mode, ranks) == ("split batch", 4):  # two prompts
            continue
        sampler, step = next(samplers), next(places)
        chosen[f"{mode}, {ranks} ranks, {sampler}, {kind} in step {step}"] = (mode, ranks, sampler, kind, step, steps)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.kept_runs")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--only", default="", help="runs in whose name this pattern is found")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    head = {"what": "kept_runs", "date": date.today().isoformat(), "hardware": measuring.hardware()}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models" / "diffusion_models"
        models.mkdir(parents=True)
        mini.save(mini.random_model(mini.IN_COMFYUI | SIZES), models / MODEL)
        inside = Inside(ComfyUI(checkout, find_python(checkout)), Path(directory), SCRIPTS)
        try:
            for name, each in runs(options.steps).items():
                if re.search(options.only, name):
                    rows |= inside.run("lost_card", name=MODEL, runs={name: each})[0]
                    rows[name].pop("traceback", None)
                    print(name, rows[name], flush=True)
                    if options.out is not None:
                        options.out.write_text(measuring.readable(head | {"steps": options.steps, "runs": rows}) + "\n")
        finally:
            inside.close()


if __name__ == "__main__":
    main()
