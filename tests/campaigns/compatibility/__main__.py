"""The command: every such node of ComfyUI and of the packs in a folder, or those that are named.

python -m tests.campaigns.compatibility --packs FOLDER --json benchmarks/results/compatibility_DATE.json --page
A run that was ended goes on where it was.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch

from scripts.comfyui_server import PACK, find_python
from testing.comfyui.scripted import ComfyUI

from .report import SPOILT, replace_tables, tables
from .runner import CORE, FAMILIES, Node, PackSession, save_models
from .verdict import BAD, Verdict, counts

AT_ONCE = 70
"""Nodes of a ComfyUI process: large packs are run in several, side by side."""


class Record:
    """The verdicts so far, in a JSON file that a run adds to.

    `again`: classes whose nodes are run all the same; all if there is none. None: nothing is run that is there.
    """

    def __init__(self, path: Path | None, again: list[str] | None):
        self.path = path
        self.verdicts: dict[tuple[str, str, str], Verdict] = {}
        self.failed: dict[str, str] = {}
        self._lock = threading.Lock()
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            self.failed = found["not loaded"]
            for entry in found["verdicts"]:
                self.add(Verdict(**entry), write=False)
        self._old = {
            key
            for key, verdict in self.verdicts.items()
            if again is not None and (not again or verdict.outcome in again or (verdict.after and SPOILT in again))
        }

    def lacks(self, node: Node, family: str) -> bool:
        """It is to be run."""
        key = (node.pack, node.name, family)
        return key in self._old or key not in self.verdicts

    def add(self, verdict: Verdict, write: bool = True) -> None:
        with self._lock:
            self.verdicts[verdict.pack, verdict.node, verdict.family] = verdict
        if write:
            self.write()

    def write(self) -> None:
        if self.path is None:
            return
        with self._lock:
            verdicts = list(self.verdicts.values())
            machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor(), "torch": torch.__version__}
            result = {"date": date.today().isoformat(), "machine": machine, "counts": counts(verdicts)}
            result["not loaded"] = self.failed
            result["verdicts"] = [verdict.as_json() for verdict in sorted(verdicts, key=lambda each: (each.pack, each.node))]
            self.path.write_text(json.dumps(result, indent=1) + "\n")


def run_part(
    comfyui: ComfyUI,
    models: Path,
    pack: Path | None,
    part: tuple[int, int],
    names: set[str],
    families: Iterable[str],
    record,
) -> int:
    """Every n-th node of a pack, beginning with the k-th: `part` is (k, n). How many parts the pack has."""
    with contextlib.closing(PackSession(comfyui, models, pack)) as session:
        if session.failed:
            record.failed[pack.name] = session.failed
            record.write()
            return 1
        record.failed.pop(CORE if pack is None else pack.name, None)
        chosen = [node for node in session.nodes if not names or node.name in names]
        parts = max(1, -(-len(chosen) // AT_ONCE)) if part[1] == 0 else part[1]
        for family in families:
            todo = [node for node in chosen[part[0] :: parts] if record.lacks(node, family)]
            for verdict in session.run(todo, family) if todo else ():
                record.add(verdict)
                psnr = "" if verdict.psnr is None else f"{verdict.psnr:.0f} dB"
                after = f" | AFTER {verdict.after}" if verdict.after else ""
                print(
                    f"{verdict.pack} | {verdict.node} | {family} | {verdict.outcome} {psnr} | {verdict.word[:300]}{after}",
                    flush=True,
                )
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="nodes; all if none is named")
    parser.add_argument(
        "--packs", type=Path, help="folder of custom node packs; without it only ComfyUI's own nodes are tried"
    )
    parser.add_argument("--only", nargs="*", help=f"packs by their folders' names; {CORE} is ComfyUI")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI", help="folder with ComfyUI's main.py")
    parser.add_argument("--processes", type=int, default=2, help="ComfyUI processes at a time")
    parser.add_argument("--json", type=Path, help="the result; what is there already is not run again")
    parser.add_argument(
        "--again", nargs="*", metavar="CLASS", help="run what is there all the same: all of it, or nodes of these classes"
    )
    parser.add_argument("--page", action="store_true", help="write the tables of benchmarks/results/compatibility.md")
    parser.add_argument("--before", type=Path, help="an earlier result, to count what became of its nodes")
    options = parser.parse_args()
    checkout = options.comfyui.resolve()
    comfyui = ComfyUI(checkout, find_python(checkout))
    packs = [] if options.packs is None else sorted(path for path in options.packs.iterdir() if path.is_dir())
    packs = [path for path in (None, *packs) if not options.only or (CORE if path is None else path.name) in options.only]
    record = Record(options.json, options.again)
    with tempfile.TemporaryDirectory(prefix="parallel-dit-models-") as folder, ThreadPoolExecutor(options.processes) as pool:
        models = Path(folder)
        save_models(models, comfyui)

        def whole(pack: Path | None) -> None:
            arguments = (set(options.names), options.families, record)
            parts = run_part(comfyui, models, pack, (0, 0), *arguments)
            for future in [pool.submit(run_part, comfyui, models, pack, (k, parts), *arguments) for k in range(1, parts)]:
                waiting.append(future)

        waiting = [pool.submit(whole, pack) for pack in packs]
        while waiting:
            waiting.pop(0).result()
    verdicts = list(record.verdicts.values())
    print(json.dumps(counts(verdicts), indent=1))
    if options.page:
        before = list(Record(options.before, None).verdicts.values())
        page = PACK / "benchmarks" / "results" / "compatibility.md"
        page.write_text(replace_tables(page.read_text(), tables(verdicts, record.failed, before)))
    return int(any(verdict.outcome in BAD or verdict.after for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
