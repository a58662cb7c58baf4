"""The command: every template with a diffusion model of this machine, or those that are named.

    python -m tests.campaigns.templates --json benchmarks/results/templates_DATE.json --page

Or another pack's workflow files, after *Move in from other packs*:

    python -m tests.campaigns.templates --move-in FOLDER/*.json --json benchmarks/results/move_in_DATE.json
"""

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.comfyui_server import PACK, find_python
from testing.comfyui.scripted import ComfyUI, Inside
from tests.comfyui.conftest import SCRIPTS

from ..result import keep
from .conversion import convert, move_in
from .runner import DIFFERS, FAILED, Verdict, run_all

START, END = "<!-- templates: python -m tests.campaigns.templates -->", "<!-- end of templates -->"
SHORT = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="templates; all if none is named")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI", help="folder with ComfyUI's main.py")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--page", action="store_true", help="write the table of benchmarks/results/templates.md")
    parser.add_argument("--move-in", nargs="+", type=Path, default=[], help="workflow files to run in place of templates")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    python = find_python(checkout)
    verdicts, moved = [], []
    with tempfile.TemporaryDirectory(prefix="parallel-dit-templates-") as folder:
        base = Path(folder)
        for name in ("models/diffusion_models", "models/loras", "input", "output"):
            (base / name).mkdir(parents=True)
        if options.move_in:
            moved = move_in(checkout, python, base, options.move_in)
        chosen = [template for template, _ in moved] or convert(checkout, python, base, options.names)
        with contextlib.closing(Inside(ComfyUI(checkout, python), base, SCRIPTS)) as inside:
            for verdict in run_all(chosen, inside, base):
                verdicts.append(verdict)
                print(f"{verdict.name}: {verdict.outcome} {verdict.difference or ''} {verdict.reason}", flush=True)
    told = {"left": {template.name: left for template, left in moved if left}} if moved else {"uses": uses(verdicts)}
    keep(options.json, **told, templates=[verdict.as_json() for verdict in verdicts])
    if options.page:
        page = PACK / "benchmarks" / "results" / "templates.md"
        before, rest = page.read_text().split(START)
        page.write_text(f"{before}{START}\n{table(verdicts)}\n{END}{rest.split(END)[1]}")
    return int(any(verdict.outcome in (DIFFERS, FAILED) for verdict in verdicts))


def uses(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How often templates of each outcome were used."""
    found: Counter[str] = Counter()
    for verdict in verdicts:
        found[verdict.outcome] += verdict.uses
    return dict(found)


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: what the outcomes are, then every template, the most used first."""
    count = Counter(verdict.outcome for verdict in verdicts)
    lines = ["| outcome | templates | uses |", "|---|---|---|"]
    lines += [f"| {outcome} | {count[outcome]} | {used} |" for outcome, used in uses(verdicts).items()]
    lines += ["", "| template | uses | outcome | |", "|---|---|---|---|"]
    for verdict in verdicts:
        said = f"{verdict.difference:.1e}" if verdict.difference is not None else verdict.reason.replace("|", "/")[:SHORT]
        lines.append(f"| {verdict.name} | {verdict.uses} | {verdict.outcome} | {said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
