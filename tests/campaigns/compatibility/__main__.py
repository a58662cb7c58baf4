"""The command: every such node of ComfyUI and of the packs in a folder, or those that are named.

python -m tests.campaigns.compatibility --packs FOLDER --json benchmarks/results/compatibility_DATE.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI

from ..result import keep
from .runner import DIFFERS, FAILED, counts, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="nodes; all if none is named")
    parser.add_argument("--packs", type=Path, help="folder of custom node packs; without it ComfyUI's own nodes alone")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI", help="folder with ComfyUI's main.py")
    parser.add_argument("--json", type=Path, help="the result")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    packs = () if options.packs is None else tuple(path for path in options.packs.iterdir() if path.is_dir())
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="parallel-dit-compatibility-") as folder:
        for verdict in run_all(ComfyUI(checkout, find_python(checkout)), Path(folder), packs, options.names):
            verdicts.append(verdict)
            print(
                f"{verdict.name}, {verdict.files[0]}: {verdict.outcome} {verdict.difference} {verdict.reason}",
                flush=True,
            )
    print(json.dumps(counts(verdicts), indent=1))
    keep(options.json, counts=counts(verdicts), verdicts=[verdict.as_json() for verdict in verdicts])
    return int(any(verdict.outcome in (DIFFERS, FAILED) for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
