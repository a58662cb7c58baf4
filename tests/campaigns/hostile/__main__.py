"""The command: all kinds of files, counted by what came of them."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from scripts.comfyui_server import find_python
from testing.comfyui.scripted import ComfyUI
from testing.thread_ranks import thread_ranks
from tests.support.planted_comfyui import planted_comfyui

from . import files, loras
from .verdict import Tally, ranks_of, run

SHARES = {"own classes": 0.4, "quantised": 0.3, "GGUF": 0.1, "LoRA": 0.2}
"""Of all cases. LoRA files need a ComfyUI."""


def tallies(count: int, seed: int, only: list[str], folder: Path) -> Iterator[Tally]:
    counts = {kind: max(1, round(count * share)) for kind, share in SHARES.items() if kind in only}
    (place := folder / "files").mkdir()
    with planted_comfyui(), thread_ranks() as start, ranks_of(start) as ranks:
        kinds = {"own classes": files.own_classes(place), "quantised": files.packed(place), "GGUF": files.ggufs(place)}
        for kind in [kind for kind in kinds if kind in counts]:
            yield run(kind, kinds[kind], counts[kind], seed, ranks)
    if "LoRA" in counts:
        checkout = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
        (base := folder / "comfyui").mkdir()
        yield loras.run(ComfyUI(checkout, find_python(checkout)), base, counts["LoRA"], seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SHARES), help=f"of {', '.join(SHARES)}")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory(prefix="parallel-dit-hostile-") as folder:
        for tally in tallies(options.count, options.seed, options.only, Path(folder)):
            found.append(tally)
            print(f"{tally.kind}: {dict(tally.outcomes)}, {len(tally.defects)} defects", flush=True)
            for number, text in tally.defects.items():
                print(f"case {number}: {text}")
    if options.out is not None:
        options.out.write_text(json.dumps(result(options.seed, found), indent=1) + "\n")
    return int(any(tally.defects for tally in found))


def result(seed: int, found: list[Tally]) -> dict[str, Any]:
    return {
        "what": "hostile files and LoRA files: a named error on the client, or a right picture",
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
        "kinds": [vars(tally) for tally in found],
    }


if __name__ == "__main__":
    sys.exit(main())
