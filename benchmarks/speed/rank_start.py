"""The start of two ranks by ComfyUI's own class beside the family's: from loading to the first call's answer.

    python -m benchmarks.speed.rank_start --comfyui ~/ComfyUI --out benchmarks/results/rank_start_NAME_DATE.json

Each start has a ComfyUI and ranks of its own; the two take turns. The weights' file is in the page cache, and the class's
proof was kept by a run before, which does not count. The larger of the two ranks' figures is given.
"""

import argparse
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside

from .one_rank_native import SUBJECTS

SCRIPTS = Path(__file__).resolve().parents[1] / "harness" / "inside"
WAYS = {"family": False, "own class": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    head = {"what": "rank_start", "date": date.today().isoformat(), "hardware": measuring.hardware()}
    rows: list[dict[str, Any]] = []
    for name, subject in SUBJECTS.items():
        with tempfile.TemporaryDirectory() as directory:
            files = Path(directory) / "models" / "diffusion_models"
            files.mkdir(parents=True)
            subject.save(files / f"{name}.safetensors")
            inside = Inside(ComfyUI(checkout, find_python(checkout)), Path(directory), SCRIPTS)
            call = {"latent": subject.latent, "text": subject.text, "pooled": subject.pooled}
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            try:
                for _ in range(1 + options.rounds):
                    for way, own in WAYS.items():
                        found[way].append(inside.run("rank_start", file=f"{name}.safetensors", own=own, **call)[0]["start"])
            finally:
                inside.close()
        rows += [{"model": str(subject), "by": way} | row(starts[1:]) for way, starts in found.items()]
        measuring.report(head | {"rows": rows}, options.out)


def row(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of starts."""
    return {
        "seconds": measuring.figure([each["seconds"] for each in starts]),
        "client_cpu_seconds": measuring.figure([each["client"] for each in starts]),
        "rank_cpu_seconds": measuring.figure([max(each["rank"]) for each in starts]),
        "rank_anonymous_MB": measuring.figure([max(each["bytes"]) / 1e6 for each in starts], 1),
    }


if __name__ == "__main__":
    main()
