"""Seconds of a trial of ComfyUI's own classes at real widths, in a ComfyUI of its own for each model.

python -m benchmarks.speed.trial_seconds --comfyui ~/ComfyUI --out trial_seconds.json
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.comfyui_pictures import SCRIPTS
from benchmarks.one_gpu.kept import keep, parser
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside

MODELS = "flux-dev", "wan-2.2-t2v-14b", "minimax-h3", "auraflow"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    options.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    given = options.parse_args()
    checkout = given.comfyui.resolve()
    models: dict[str, Any] = {}
    for name in given.models:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "models" / "diffusion_models").mkdir(parents=True)
            inside = Inside(ComfyUI(checkout, find_python(checkout)), Path(directory), SCRIPTS)
            models |= inside.run("trial_seconds", names=[name])[0]
            inside.close()
        said = ", ".join(f"{each} {row['seconds']} s" for each, row in models.items() if "seconds" in row)
        keep(given.out, {"summary": said, "models": models})


if __name__ == "__main__":
    main()
