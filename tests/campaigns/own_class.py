"""Files that families compute, by ComfyUI's own class on ranks in place of the family, against ComfyUI's own MODEL.

    python -m tests.campaigns.own_class --comfyui ~/ComfyUI --out FILE

Every small file of a family that ComfyUI reads is sampled for two steps by two stages and by split batch. Written down are
the largest difference of the latents, as a share of the native latents' largest value, or the refusal.
"""

import argparse
import tempfile
from datetime import date
from pathlib import Path

from benchmarks.harness import measuring
from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.test_families import CASES, has_class, save_case

SCRIPTS = Path(__file__).resolve().parents[1] / "comfyui" / "inside"
AT_ONCE = 4
"""Cases of one process: ranks and models of all of them stay until it ends."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    comfyui = ComfyUI(checkout, find_python(checkout))
    cases = [case for case in CASES if has_class(comfyui, case) and (not options.only or case.name in options.only)]
    rows: list[dict[str, str | float]] = []
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "models" / "diffusion_models").mkdir(parents=True)
        inside = Inside(comfyui, base, SCRIPTS)
        try:
            for start in range(0, len(cases), AT_ONCE):
                part = cases[start : start + AT_ONCE]
                for case in part:
                    save_case(case, base)
                found, _ = inside.run("own_class_families", names=[case.name for case in part])
                for name, each in found.items():
                    case_name, _, mode = name.rpartition(", ")
                    result = {"refused": each["error"]} if "error" in each else {"share": each["share"]}
                    rows.append({"case": case_name, "mode": mode, **result})
                    print(rows[-1], flush=True)
        finally:
            inside.close()
    head = {"what": "own_class", "date": date.today().isoformat(), "hardware": measuring.hardware()}
    measuring.report(head | {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
