"""The speed of everything, beside its peers, in one command:

    python -m benchmarks.suite --xdit-python /path/to/venv/with/xfuser/bin/python
    python -m benchmarks.suite --quick --only flux,overheads
    python -m benchmarks.suite --only field-pixart --devices cuda --layers 28 --side 256

Each part writes a dated JSON into benchmarks/results as soon as it is done; `python -m benchmarks.suite.render` makes
docs/benchmarks.md and its plots of the newest ones. Parts that are not asked for by name and need another machine are left
out with a word.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from . import measuring, two_ranks
from .subjects import FLUX_LIKE, PIXART_LIKE

RESULTS = Path(__file__).resolve().parent.parent / "results"
Say = Callable[[str], None]


def _two_ranks(subject):
    return lambda given, say: two_ranks.run(subject, given.rounds, say, given.xdit_python, given.cases)


PARTS: dict[str, Callable[[argparse.Namespace, Say], dict]] = {
    "flux": _two_ranks(FLUX_LIKE),
    "pixart": _two_ranks(PIXART_LIKE),
}


def chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return names


def parse(arguments: list[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", type=chosen, default=list(PARTS), help=f"comma list of {', '.join(PARTS)}")
    options.add_argument("--cases", type=lambda text: text.split(","), help="comma list of cases on two ranks")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="one round")
    options.add_argument("--xdit-python", type=Path, help="interpreter that has xfuser; without it xDiT is left out")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--label", default="2cores", help="of the machine, for the results' names")
    given = options.parse_args(arguments)
    given.rounds = 1 if given.quick else given.rounds
    return given


def main(arguments: list[str]) -> None:
    given = parse(arguments)
    torch.set_num_threads(1)
    say = measuring.Progress()
    for name in given.only:
        say(f"== {name}")
        say(f"{name}: {measuring.keep(PARTS[name](given, say), given.out, given.label)}")


if __name__ == "__main__":
    main(sys.argv[1:])
