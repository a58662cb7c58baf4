"""ComfyUI's own classes on ranks against ComfyUI's own MODEL.

    python -m tests.campaigns.own_class --comfyui ~/ComfyUI --out FILE

Small files are sampled for three steps in every mode. Written down are the largest difference of the latents, as a share of
the native latents' largest value, or the refusal.
"""

import argparse
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.test_own_classes import CLASSES, NEWER, UNETS

SCRIPTS = Path(__file__).resolve().parents[1] / "comfyui" / "inside"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    comfyui = ComfyUI(checkout, find_python(checkout))
    newer = [name for name, kind in NEWER.items() if comfyui.has_class(kind)]
    classes = [name for name in (*UNETS, *CLASSES, *newer) if not options.only or name in options.only]
    head = {"what": "own_class", "date": date.today().isoformat(), "hardware": measuring.hardware()}
    rows: list[Row] = []

    def add(found: dict[str, Any]) -> None:
        """Rows are kept at once: a run of all cases takes more than an hour."""
        rows.extend(rows_of(found))
        measuring.report(head | {"rows": rows}, options.out)

    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "models" / "diffusion_models").mkdir(parents=True)
        inside = Inside(comfyui, base, SCRIPTS)
        try:
            for name in classes:
                add(inside.run("own_classes", names=[name])[0])
        finally:
            inside.close()


def rows_of(found: dict[str, Any]) -> list[Row]:
    """A row for each mode of a case."""
    rows: list[Row] = []
    for name, each in found.items():
        case, _, mode = name.rpartition(", ")
        told = {"share": each} if not isinstance(each, dict) else {"refused": each["error"]} if "error" in each else each
        rows.append({"case": case, "mode": mode} | told)
    return rows


if __name__ == "__main__":
    main()
