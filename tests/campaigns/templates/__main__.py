"""The command: every template with a diffusion model of this machine, or those that are named.

python -m tests.campaigns.templates --json benchmarks/results/templates_DATE.json --docs
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from scripts.comfyui_server import PACK, find_python
from tests.comfyui.conftest import ComfyUI, Inside

from .conversion import convert
from .report import replace_table, summary
from .runner import DIFFERS, FAILED, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="templates; all if none is named")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI", help="folder with ComfyUI's main.py")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/templates.md")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    python = find_python(checkout)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="parallel-dit-templates-") as folder:
        base = Path(folder)
        for name in ("models/diffusion_models", "models/loras", "input", "output"):
            (base / name).mkdir(parents=True)
        templates = convert(checkout, python, base)
        if unknown := set(options.names) - {template.name for template in templates}:
            parser.error(f"no such template: {', '.join(sorted(unknown))}")
        chosen = [template for template in templates if template.name in (options.names or (template.name,))]
        with contextlib.closing(Inside(ComfyUI(checkout, python), base)) as inside:
            for verdict in run_all(chosen, inside, base):
                verdicts.append(verdict)
                print(
                    f"{verdict.uses:6} {verdict.name}: {verdict.outcome} {verdict.difference or ''} {verdict.reason}",
                    flush=True,
                )
    print(json.dumps(summary(verdicts), indent=1))
    if options.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor(), "torch": torch.__version__}
        result = {"date": date.today().isoformat(), "machine": machine, "summary": summary(verdicts)}
        result["templates"] = [verdict.as_json() for verdict in verdicts]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.docs:
        page = PACK / "docs" / "templates.md"
        page.write_text(replace_table(page.read_text(), verdicts))
    return int(any(verdict.outcome in (DIFFERS, FAILED) for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
