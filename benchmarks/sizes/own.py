"""ComfyUI's own class on ranks beside ComfyUI itself: kernels and bytes of a step at real sizes, by tracing.
"peak": bytes of a run with its weights.

python -m benchmarks.sizes.own --comfyui ~/ComfyUI --out FILE
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from benchmarks.sizes.real_models import REAL_MODELS
from parallel_backend.core.degrees import Degrees
from scripts.comfyui_server import find_python

from .native import native_figures
from .trace import Figures, mode_name

SCRIPT = Path(__file__).with_name("inside_own.py")
MODES = ("ulysses", 1), ("ulysses", 2), ("tensor", 2), ("pipe", 2)
STEP = "kernels", "products", "moved", "stops"


def own_figures(checkout: Path, cases: Sequence[tuple[str, str, int]]) -> Iterator[list[Figures]]:
    """By rank, of each case. RuntimeError if ComfyUI ends before the last one: its log is in this process's."""
    command = [find_python(checkout), str(SCRIPT), *(":".join(map(str, case)) for case in cases)]
    with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True) as comfyui:
        assert comfyui.stdout is not None
        for _ in cases:
            if not (line := comfyui.stdout.readline()):
                raise RuntimeError("ComfyUI ended")
            yield json.loads(line)


def of_step(figures: dict[str, Any]) -> dict[str, int]:
    return {text: figures[text] for text in STEP}


def shown(figures: dict[str, Any] | None) -> str:
    return "none" if figures is None else f"{figures['kernels']} kernels, {figures['moved'] / 1e9:.1f} GB"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--comfyui", type=Path, required=True)
    options.add_argument("--models", type=lambda text: text.split(","), default=list(REAL_MODELS))
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    say, checkout = measuring.TimedLog(), given.comfyui.resolve()
    result: dict[str, Any] = {"what": "own_class_real_sizes", "date": date.today().isoformat(), "cases": {}}
    cases = [(name, *mode) for name in given.models for mode in MODES]
    for (name, axis, ranks), found in zip(cases, own_figures(checkout, cases), strict=True):
        key = f"{name}, {mode_name(Degrees(**{axis: ranks}))}"
        native = native_figures(checkout, REAL_MODELS[name]) if ranks == 1 else None
        result["cases"][key] = {
            "own class": [of_step(each) | {"peak": each["peak"]} for each in found],
            "native": native and of_step(native),
        }
        say(f"{key}: own class {shown(found[0])}; native {shown(native)}")
        given.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
