"""Makes the plans of published models that ship with the pack, on the CPU, by a ComfyUI checkout.

    python -m scripts.make_plans --comfyui ~/ComfyUI [--only flux-dev wan-2.2-t2v-14b]

A model takes one to thirty minutes. Others' plans in the file of its class stay, if they are for the same code.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from parallel_backend.core.kept_file import digest
from parallel_backend.own_class.plans.plan import NAME, PLANS
from scripts.comfyui_server import find_python
from scripts.plans.published import PUBLISHED
from testing.comfyui.scripted import ComfyUI, Inside

SECONDS_A_MODEL = 3600.0
SCRIPTS = Path(__file__).with_name("plans")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--only", nargs="*", default=[], help="names of published models")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    for name, made in all_made(checkout, options.only):
        if "error" in made:
            print(f"{name}: {made['error']}")
            continue
        path = PLANS / made["file"]
        write(path, made["key"], [*others(path, made["key"], name), *made["plans"]], version_of(checkout))
        print(f"{name}: {len(made['plans'])} in {path.name}", flush=True)


def all_made(checkout: Path, only: list[str]) -> Any:
    """(name, file, key and plans as JSON, or an error) of published models, made anew."""
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "models" / "diffusion_models").mkdir(parents=True)
        inside = Inside(ComfyUI(checkout, find_python(checkout)), base, SCRIPTS)
        try:
            for name in only or PUBLISHED:
                yield name, inside.run("make_plans", name=name, seconds=SECONDS_A_MODEL)[0][name]
        finally:
            inside.close()


def others(path: Path, key: dict[str, Any], name: str) -> list[Any]:
    """Plans of other models in the file, if they are for the same code."""
    file = json.loads(path.read_text()) if path.exists() else {"key": None}
    return [plan for plan in file[NAME] if plan["name"] != name] if file["key"] == key else []


def write(path: Path, key: dict[str, Any], plans: list[Any], version: str) -> None:
    """The file, a line for each plan. `version`: of ComfyUI, to be read."""
    lines = ",\n".join(json.dumps(plan, separators=(",", ":")) for plan in plans)
    head = f'"key":{json.dumps(key)},\n"made with ComfyUI":"{version}",\n"digest":"{digest(plans)}"'
    path.write_text(f'{{{head},\n"{NAME}":[\n{lines}\n]}}\n')


def version_of(checkout: Path) -> str:
    """Of ComfyUI."""
    return re.findall(r'__version__ = "(.+)"', (checkout / "comfyui_version.py").read_text())[0]


if __name__ == "__main__":
    main()
