"""`python -m tests.campaigns.states [--examples N] [--steps N] [--seed N] [--out FILE.json]`

Runs so many examples of the state machine, each with so many rules at most. Exit status 1 if an example fails.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from ..result import keep
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
    keep(arguments.out, **vars(found))
    return 1 if found.said else 0


if __name__ == "__main__":
    sys.exit(main())
