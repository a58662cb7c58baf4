"""Run a workflow in API form with a real ComfyUI, headless, and save its picture. Standard library only.

    python scripts/run_comfyui_workflow.py ~/ComfyUI workflows/api/quickstart.json --out quickstart-comfyui.png

The checkout stays as it is: the server has a temporary base directory with this pack in it and a free loopback port.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from comfyui_server import ComfyUIServer, find_python, missing_requirements


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with ComfyUI's main.py")
    parser.add_argument("workflow", type=Path, help="workflow in API form")
    parser.add_argument("--out", type=Path, default=Path("comfyui.png"), help="where its first picture is saved")
    parser.add_argument("--gpu", action="store_true", help="let ComfyUI itself use the GPU")
    parser.add_argument("--models", type=Path, help="folder whose files become models/diffusion_models")
    options = parser.parse_args()
    checkout = options.checkout.expanduser().resolve()
    if not (checkout / "main.py").is_file():
        print(f"{checkout} holds no ComfyUI: there is no main.py", file=sys.stderr)
        return 2
    python = find_python(checkout)
    if missing := missing_requirements(python):
        print(f"{python} lacks {', '.join(missing)}: install ComfyUI's and this pack's requirements", file=sys.stderr)
        return 2
    prompt = json.loads(options.workflow.read_text())
    with tempfile.TemporaryDirectory(prefix="parallel-dit-comfyui-") as base:
        if options.models is not None:
            (Path(base) / "models").mkdir()
            (Path(base) / "models" / "diffusion_models").symlink_to(options.models.expanduser().resolve())
        with ComfyUIServer(checkout, Path(base), python, () if options.gpu else ("--cpu",)) as server:
            outcome = server.run(prompt)
    for shown in outcome.outputs.values():
        for text in shown.get("text", ()):
            print(text)
    if outcome.status != "success" or not outcome.images:
        print(outcome.error or f"the workflow ended with {outcome.status} and no picture", file=sys.stderr)
        return 1
    options.out.write_bytes(outcome.images[0])
    print(f"saved {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
