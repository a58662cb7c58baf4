"""A rank is killed, hangs or runs out of memory in every step of a run of 20.

    python -m tests.campaigns.lost_card [--seed 0] [--minutes 8] [--kinds killed hangs] [--out FILE.json]

On 2 and 4 CPU ranks, with three samplers, in a mode drawn for each run. First each kind of failure with one sampler, in
every step; then the others in a random order. A run that FILE has is not made again, so several calls make one result. Exit
status 1 if a run did not go on or its latents differ.
"""

import argparse
import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.comfyui_server import find_python
from testing import mini
from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.conftest import SCRIPTS
from tests.comfyui.test_lost_card import LIMIT

from .result import keep

STEPS = 20
KINDS = ("killed", "hangs", "out of memory")
SAMPLERS = ("euler", "dpmpp_2m", "euler_ancestral")
MODES = ("ulysses", "ring", "tensor", "split batch", "displaced", "stages", "stages with a LoRA", "pipefusion")
NOT_ON_4 = {
    "tensor": "the small model has two heads",
    "ulysses": "the small model has two heads",
    "split batch": "a call has two entries",
    "displaced": "on the ranks that are left the image is cut elsewhere, which is another approximation",
}
"""Modes that these runs do not have on 4 ranks. After ranks ran out of memory there are still four, so patches stay."""
WITHOUT_BLOCKS = ("stages", "stages with a LoRA", "pipefusion")
"""A stage of the small model on 4 ranks has no block that it could stream after it ran out of memory."""
AT_ONCE = 4
"""Runs in one script, which computes the run that loses nothing once for each model, mode and sampler. Runs that are out of
memory are alone: the process streams all of this small model from the first time on, and the second is an error."""
Run = tuple[str, int, str, str, int, int]
"""Mode, ranks, sampler, kind, step, steps: see tests/comfyui/inside/lost_card.py."""


def modes_of(kind: str, ranks: int) -> list[str]:
    if ranks == 2:
        return list(MODES)
    without = {*NOT_ON_4, *WITHOUT_BLOCKS} - {"displaced"} if kind == "out of memory" else set(NOT_ON_4)
    return [mode for mode in MODES if mode not in without]


def draw(seed: int) -> list[Run]:
    """All kinds, steps, ranks and samplers. The mode is the same for several runs, because its samples are needed once."""
    chance, first, others = random.Random(seed), [], []
    for kind, ranks, sampler in itertools.product(KINDS, (2, 4), SAMPLERS):
        modes = modes_of(kind, ranks)
        drawn = itertools.cycle(chance.sample(modes, min(5, len(modes))))
        steps = zip(chance.sample(range(1, STEPS + 1), STEPS), drawn)  # noqa: B905 (a cycle has no end)
        runs = sorted((mode, ranks, sampler, kind, step, STEPS) for step, mode in steps)
        (first if SAMPLERS.index(sampler) == KINDS.index(kind) else others).append(runs)
    parts = [runs[at : at + AT_ONCE] for runs in others for at in range(0, STEPS, AT_ONCE)]
    return [run for runs in (*first, *chance.sample(parts, len(parts))) for run in runs]


def name_of(run: Run) -> str:
    return f"{run[0]}, {cell_of(run)}"


def cell_of(run: Run) -> str:
    """The run's name without its mode."""
    _, ranks, sampler, kind, step, _ = run
    return f"{ranks} ranks, {sampler}, {kind} in step {step}"


def row(found: dict[str, Any]) -> dict[str, Any]:
    """Of a run: what was lost and by how much its latents differ, or the error."""
    if "error" in found:
        return {"wrong": found["error"]}
    again = [text for text in found["told"] if "computed again" in text]
    difference = min(found["difference"], found.get("difference of bands", found["difference"]))
    got = {
        "steps lost": len(again),
        "seconds told": sum(float(re.search(r"([\d.]+) s$", text)[1]) for text in again),
        "seconds": round(found["seconds"], 2),
        "seconds of a run that loses nothing": round(found["seconds of a run that loses nothing"], 2),
        "difference": difference,
    }
    reasons = {
        "no rank failed": found["did not fail"],
        "the latents differ": difference > LIMIT,
        "not one step was computed again": len(again) != 1,
        "the setup is another one afterwards": found["setup after"] != found["setup before"],
    }
    wrong = "; ".join(reason for reason, holds in reasons.items() if holds)
    return got | ({"wrong": wrong, "told": found["told"]} if wrong else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of failure")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options = parser.parse_args()
    checkout, end = options.comfyui.resolve(), time.monotonic() + 60 * options.minutes
    rows = json.loads(options.out.read_text())["runs"] if options.out and options.out.exists() else {}
    done = {name.partition(", ")[2] for name in rows}
    left = [run for run in draw(options.seed) if cell_of(run) not in done and run[3] in options.kinds]
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models" / "diffusion_models"
        models.mkdir(parents=True)
        mini.save(mini.random_model(mini.IN_COMFYUI), models / "tiny.safetensors")
        with contextlib.closing(Inside(ComfyUI(checkout, find_python(checkout)), Path(directory), SCRIPTS)) as inside:
            while left and time.monotonic() < end:
                count = 1 if left[0][3] == "out of memory" else AT_ONCE
                runs, left = {name_of(run): run for run in left[:count]}, left[count:]
                found, _ = inside.run("lost_card", name="tiny.safetensors", runs=runs)
                rows |= {name: row(each) for name, each in found.items()}
                keep(options.out, seed=options.seed, steps=STEPS, runs=rows)
                print(*((name, rows[name]) for name in runs), f"{len(left)} left", sep="\n", flush=True)
    return int(any("wrong" in each for each in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
