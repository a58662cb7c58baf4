"""ComfyUI's own classes on ranks against ComfyUI's own MODEL.

    python -m tests.campaigns.own_class --comfyui ~/ComfyUI --out FILE

Small files are sampled for three steps in every mode. Written down are the largest difference of the latents, as a share of
the native latents' largest value, or the refusal.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.conftest import SCRIPTS
from tests.comfyui.test_own_classes import CLASSES, NEWER, UNETS

from .result import keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--only", nargs="*", default=[], help="names of small_models.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkout, rows = options.comfyui.resolve(), []
    comfyui = ComfyUI(checkout, find_python(checkout))
    classes = *UNETS, *CLASSES, *(name for name, kind in NEWER.items() if comfyui.has_class(kind))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "models" / "diffusion_models").mkdir(parents=True)
        with contextlib.closing(Inside(comfyui, Path(directory), SCRIPTS)) as inside:
            for name in options.only or classes:
                found, _ = inside.run("own_classes", names=[name])
                rows += [row(case, each) for case, each in found.items()]
                print(*rows[-len(found) :], sep="\n", flush=True)
                keep(options.out, rows=rows)  # at once: a run of all cases takes more than an hour


def row(name: str, found: Any) -> dict[str, Any]:
    """Of a mode of a case."""
    case, _, mode = name.rpartition(", ")
    told = {"share": found} if not isinstance(found, dict) else {"refused": found["error"]} if "error" in found else found
    return {"case": case, "mode": mode} | told


if __name__ == "__main__":
    main()
