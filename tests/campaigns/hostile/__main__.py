"""The command: all kinds of cases, counted by what came of them."""

import argparse
import json
import os
import platform
import random
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from parallel_backend.core.degrees import Degrees
from testing.thread_ranks import thread_ranks

from . import files
from .verdict import Tally, ranks_of, run

SHARES = {"single files": 0.35, "folders": 0.30, "quantised": 0.25, "GGUF": 0.10}
"""Of all cases."""


def degrees(rng: random.Random) -> Degrees:
    """Mostly one rank, since more need the file's part of the arithmetic alone."""
    return rng.choice((*[Degrees()] * 4, Degrees(pipe=2), Degrees(tensor=2)))


def say(number: int, text: str) -> None:
    sys.stdout.write(f"case {number}: {text}\n")
    sys.stdout.flush()


def run_all(count: int, seed: int, only: list[str]) -> list[Tally]:
    tallies = []
    with files.scratch() as name, thread_ranks() as start, ranks_of(start) as ranks:
        places = {part: Path(name) / part for part in ("made", "sound")}
        for place in places.values():
            place.mkdir()
        kinds = {
            "single files": files.singles(places["made"]),
            "folders": files.folders(places["made"], places["sound"]),
            "quantised": files.packed(places["made"]),
            "GGUF": files.ggufs(places["made"]),
        }
        for kind, make in kinds.items():
            if not only or kind in only:
                tallies.append(run(kind, make, max(1, round(count * SHARES[kind])), seed, ranks, degrees, say))
                sys.stdout.write(f"{tallies[-1]}\n")
                sys.stdout.flush()
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(SHARES)}")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    tallies = run_all(options.count, options.seed, options.only)
    defects = sum(len(tally.defects) for tally in tallies)
    sys.stdout.write(
        f"{sum(tally.count for tally in tallies)} cases in {time.monotonic() - begun:.0f} s, {defects} defects\n"
    )
    if options.out is not None:
        found = {"date": date.today().isoformat(), "hardware": f"{platform.machine()}, {os.cpu_count()} cores"}
        found |= {"seed": options.seed, "kinds": [asdict(tally) for tally in tallies]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
