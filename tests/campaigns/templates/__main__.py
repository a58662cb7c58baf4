"""The command: every template with a diffusion model of this machine, or those that are named.

python -m tests.campaigns.templates --json benchmarks/results/templates_DATE.json --page
python -m tests.campaigns.templates --menu --json benchmarks/results/templates_menu_DATE.json NAME ...
python -m tests.campaigns.templates --streamed --json benchmarks/results/templates_streamed_DATE.json NAME ...
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from scripts.comfyui_server import PACK, find_python
from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.conftest import SCRIPTS

from .conversion import convert, graph_of
from .menu import Trial, try_all
from .report import replace_table, summary
from .runner import DIFFERS, FAILED, Verdict, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="templates; all if none is named")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI", help="folder with ComfyUI's main.py")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--menu", action="store_true", help="the menu's Run on several GPUs on those that are named")
    parser.add_argument("--streamed", action="store_true", help="on emulated devices that hold two blocks, rest streamed")
    parser.add_argument("--page", action="store_true", help="write the table of benchmarks/results/templates.md")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    python = find_python(checkout)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="parallel-dit-templates-") as folder:
        base = Path(folder)
        for name in ("models/diffusion_models", "models/loras", "input", "output"):
            (base / name).mkdir(parents=True)
        chosen = convert(checkout, python, base, options.names)
        with contextlib.closing(Inside(ComfyUI(checkout, python), base, SCRIPTS)) as inside:
            if options.menu:
                graphs = [(template, graph_of(python, template.name)) for template in chosen]
                return report_trials(try_all(graphs, checkout, python, inside, base), options.json)
            ours = {"streamed": True} if options.streamed else {}
            for verdict in run_all(chosen, inside, base, **ours):
                verdicts.append(verdict)
                print(
                    f"{verdict.uses:6} {verdict.name}: {verdict.outcome} {verdict.difference or ''} {verdict.reason}",
                    flush=True,
                )
    print(json.dumps(summary(verdicts), indent=1))
    if options.json is not None:
        write(options.json, summary(verdicts), verdicts)
    if options.page:
        page = PACK / "benchmarks" / "results" / "templates.md"
        page.write_text(replace_table(page.read_text(), verdicts))
    return int(any(verdict.outcome in (DIFFERS, FAILED) for verdict in verdicts))


def report_trials(trials: Iterable[Trial], path: Path | None) -> int:
    found = []
    for trial in trials:
        found.append(trial)
        verdict = trial.verdict
        print(
            f"{verdict.name}: {trial.put} queued {trial.queued}, again '{trial.again}', undone '{trial.undone}', "
            f"{verdict.outcome} {verdict.difference or ''} {verdict.reason}",
            flush=True,
        )
        if path is not None:
            write(path, {"templates": len(found), "passed": sum(each.passed for each in found)}, found)
    return int(not all(trial.passed for trial in found))


def write(path: Path, figures: dict[str, Any], templates: Iterable[Verdict | Trial]) -> None:
    machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor(), "torch": torch.__version__}
    result = {"date": date.today().isoformat(), "machine": machine, "summary": figures}
    path.write_text(json.dumps(result | {"templates": [each.as_json() for each in templates]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
