"""`python -m tests.campaigns.states [--examples N] [--steps N] [--seed N] [--out FILE.json]`

Runs so many examples of the state machine, each with so many rules at most. Exit status 1 if an example fails.
"""

import argparse
import json
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from .machine import make_world
from .trial import trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.states")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, make_world(Path(folder)) as world:
        found = trial(world, arguments.examples, arguments.steps, arguments.seed)
    print(f"{found.examples} examples: {found.said or 'nothing found'}")
    if arguments.out is not None:
        result = {
            "what": "events in random order on ranks in threads, outputs held to a model alone",
            "date": date.today().isoformat(),
            "hardware": f"{platform.machine()} CPU, {torch.multiprocessing.cpu_count()} cores, torch {torch.__version__}",
        }
        arguments.out.write_text(json.dumps(result | vars(found), indent=1) + "\n")
    return 1 if found.said else 0


if __name__ == "__main__":
    sys.exit(main())
