"""The command: every case under many seeds, one operation at a time and many."""

import argparse
import functools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from parallel_backend.core.degrees import Degrees
from tests.support.strict.rules import Rules

from .cases import Case, all_of_them, name
from .runner import RULES, Trials, rules_of, trials

KILLED = (Degrees(pipe=2), Degrees(ulysses=2), Degrees(pipe=2, tensor=2))
DELAYS = (0.0, 0.0005, 0.002)
"""Longest delays in seconds, by turns: with none of them the ranks' own timing shows."""

BLOCK = 10
"""Seeds that a case has one after the other on the same ranks."""


@dataclass
class Found:
    """Of one case: trials by K, and what was wrong, by K and seed."""

    trials: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, places: int, seeds: list[int], work: Callable[[], list[str | None]]) -> None:
        started = time.monotonic()
        outcomes = work()
        self.seconds += time.monotonic() - started
        self.trials[places] += len(outcomes)
        self.faults |= {f"K={places} seed={seed}": wrong for seed, wrong in zip(seeds, outcomes, strict=False) if wrong}


def run_all(at_work: Trials, cases: list[Case], seeds: range, seconds: float) -> dict[str, Found]:
    """What was found by case. Seeds come in blocks, of which a case that is rare, and a killed rank, gets the first only.
    The time ends it after any case."""
    found = {case.name: Found() for case in cases} | {f"killed {name(degrees)}": Found() for degrees in KILLED}
    deadline = time.monotonic() + seconds
    for start in range(seeds.start, seeds.stop, BLOCK):
        block = list(range(start, min(start + BLOCK, seeds.stop)))
        for places in RULES:
            rules = [rules_of(places, seed, DELAYS[seed % len(DELAYS)]) for seed in block]
            work = {case.name: functools.partial(at_work.trials, case, rules[: 1 if case.rare else None]) for case in cases}
            work |= {f"killed {name(degrees)}": functools.partial(kill, at_work, degrees, rules[0]) for degrees in KILLED}
            for case, trials_of_it in work.items():
                found[case].note(places, block, trials_of_it)
                if time.monotonic() > deadline:
                    return found
        sys.stdout.write(f"seeds up to {block[-1]}: {sum(len(each.faults) for each in found.values())} faults so far\n")
        sys.stdout.flush()
    return found


def kill(at_work: Trials, degrees: Degrees, rules: Rules) -> list[str | None]:
    return [at_work.kill(degrees, rules)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.transport", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=1e9, help="no further trial after so long")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    cases = [case for case in all_of_them() if options.only in case.name]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, trials(Path(folder)) as at_work:
        seeds = range(options.first, options.first + options.seeds)
        found = run_all(at_work, cases, seeds, 60 * options.minutes)
    seconds = time.monotonic() - started
    faults = {case: each.faults for case, each in found.items() if each.faults}
    total = sum(sum(each.trials.values()) for each in found.values())
    sys.stdout.write(f"{total} trials of {len(found)} cases in {seconds:.0f} s: {len(faults)} faulty\n")
    for case, texts in faults.items():
        which, text = next(iter(texts.items()))
        sys.stdout.write(f"\n{case}, {len(texts)} of {sum(found[case].trials.values())}, {which}:\n{text}\n")
    if options.out is not None:
        result = {
            "date": date.today().isoformat(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
            "fewest_seeds_of_a_case": min(min(found[case.name].trials.values()) for case in cases if not case.rare),
            "trials": total,
            "faults": sum(map(len, faults.values())),
            "seconds": round(seconds, 1),
            "most_communicators_under_way_on_a_rank": at_work.most_under_way,
            "cases": {
                case: {"trials": each.trials, "faults": each.faults, "seconds": round(each.seconds, 1)}
                for case, each in found.items()
            },
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
