"""The command: every case under many seeds, one operation at a time and many."""

import argparse
import sys
import tempfile
from pathlib import Path

from parallel_backend.core.degrees import Degrees

from ..result import keep
from .cases import all_of_them, name
from .runner import RULES, rules_of, trials

KILLED = (Degrees(pipe=2), Degrees(ulysses=2), Degrees(pipe=2, tensor=2))
DELAYS = (0.0, 0.0005, 0.002)
"""Longest delays in seconds, by turns: with none of them the ranks' own timing shows."""
RARE = 10
"""A case that is rare, and a killed rank, get every so manieth seed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.transport", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    counts, faults = {}, {}
    with tempfile.TemporaryDirectory() as folder, trials(Path(folder)) as at_work:
        for places in RULES:
            seeds = range(options.first, options.first + options.seeds)
            rules = [rules_of(places, seed, DELAYS[seed % len(DELAYS)]) for seed in seeds]
            work = [
                (case.name, rules[:: RARE if case.rare else 1], lambda given, case=case: at_work.trials(case, given))
                for case in all_of_them()
            ]
            work += [
                (f"killed {name(each)}", rules[::RARE], lambda given, each=each: [at_work.kill(each, one) for one in given])
                for each in KILLED
            ]
            for case, given, run in work:
                if options.only not in case:
                    continue
                found = dict(zip((f"{case}, K={places}, seed {one.seed}" for one in given), run(given), strict=True))
                counts[f"{case}, K={places}"] = len(found)
                faults |= {which: wrong for which, wrong in found.items() if wrong}
                print(f"{case}, K={places}: {len(found)} trials, {len(faults)} faults so far", flush=True)
    for which, wrong in faults.items():
        print(f"\n{which}:\n{wrong}")
    most = {"most_communicators_under_way_on_a_rank": at_work.most_under_way}
    keep(options.out, **most, trials=counts, faults=faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
