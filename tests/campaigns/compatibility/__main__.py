"""The command: every such node of ComfyUI and of the packs in a folder, or those that are named.

python -m tests.campaigns.compatibility --packs FOLDER --json benchmarks/results/compatibility_DATE.json
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch

from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI

from .runner import CORE, MODELS, PackSession, save_models
from .verdict import BAD, Verdict, counts

AT_ONCE = 2
"""ComfyUI processes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="nodes; all if none is named")
    parser.add_argument("--packs", type=Path, help="folder of custom node packs; without it ComfyUI's own nodes alone")
    parser.add_argument("--only", nargs="*", help=f"packs by their folders' names; {CORE} is ComfyUI")
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI", help="folder with ComfyUI's main.py")
    parser.add_argument("--json", type=Path, help="the result")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    comfyui = ComfyUI(checkout, find_python(checkout))
    packs = [] if options.packs is None else sorted(path for path in options.packs.iterdir() if path.is_dir())
    packs = [path for path in (None, *packs) if not options.only or (CORE if path is None else path.name) in options.only]
    verdicts: list[Verdict] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="parallel-dit-models-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        save_models(Path(folder), comfyui)

        def run(pack: Path | None, model: str) -> None:
            with contextlib.closing(PackSession(comfyui, Path(folder), pack)) as session:
                if session.failed:
                    failed[pack.name] = session.failed
                chosen = [node for node in session.nodes if not options.names or node.name in options.names]
                for verdict in session.run(chosen, model):
                    verdicts.append(verdict)
                    print(verdict, flush=True)

        for done in [pool.submit(run, *which) for which in itertools.product(packs, MODELS)]:
            done.result()
    verdicts.sort(key=lambda each: (each.pack, each.node, each.model))
    print(json.dumps(counts(verdicts), indent=1))
    if options.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor(), "torch": torch.__version__}
        result = {"date": date.today().isoformat(), "machine": machine, "counts": counts(verdicts), "not loaded": failed}
        result["verdicts"] = [verdict.as_json() for verdict in verdicts]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(verdict.outcome in BAD or verdict.after for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
