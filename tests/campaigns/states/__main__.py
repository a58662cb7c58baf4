"""`python -m tests.campaigns.states [--examples N] [--steps N] [--seed N] [--plants [--only TEXT]] [--out FILE.json]`

Runs so many examples of the state machine, each with so many rules at most. `--plants`: for each planted fault,
until it is found. Exit status 1 if an example fails, or a planted fault is not found.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from .machine import make_world
from .plants import PLANTS, planted
from .trial import Outcome, trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.states")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plants", action="store_true", help="plant one fault after the other")
    parser.add_argument("--only", default="", help="a part of the planted fault's name")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: dict[str, Outcome] = {}

    with tempfile.TemporaryDirectory() as folder, make_world(Path(folder)) as world:

        def tried(name: str) -> Outcome:
            began = time.monotonic()
            outcomes[name] = found = trial(world, arguments.examples, arguments.steps, arguments.seed)
            print(
                f"{name}: {found.examples} examples, {time.monotonic() - began:.0f} s, {found.said or 'nothing found'}",
                flush=True,
            )
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(result(outcomes), indent=1) + "\n")
            return found

        if not arguments.plants:
            return 1 if tried("the product").said else 0
        for plant in PLANTS:
            if arguments.only not in plant.name:
                continue
            with planted(plant):
                tried(plant.name)
    return 0 if all(found.said for found in outcomes.values()) else 1


def result(outcomes: dict[str, Outcome]) -> dict[str, object]:
    return {
        "what": "events in random order on ranks in threads, outputs held to a model alone; planted faults of two events",
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()} CPU, {torch.multiprocessing.cpu_count()} cores, torch {torch.__version__}",
        "outcomes": {
            name: {"examples": found.examples, "happened": found.happened, "found": found.said}
            for name, found in outcomes.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
