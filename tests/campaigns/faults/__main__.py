"""`python -m tests.campaigns.faults [--count 200] [--seed N] [--only KIND,...] [--patience FACTOR] [--out FILE.json]`

Injects that many faults, one after the other, and says what came of each: a named error in time (or the right result), the
right result of the next prompt, nothing left behind. Exit status 1 if anything failed.
"""

import argparse
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from testing.fork_server import forked_ranks

from ..result import keep
from . import table, trial
from .session import fault_session

SILENCE = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"kinds, comma between them: {', '.join(table.KINDS)}")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits, for a machine with other work")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("parallel_backend").addHandler(logging.NullHandler())  # every fault is warned of
    kinds = [kind.strip() for kind in arguments.only.split(",") if kind.strip()] or list(table.KINDS)
    if unknown := set(kinds) - set(table.KINDS):
        parser.error(f"--only: no kind of fault is called {', '.join(sorted(unknown))}")
    verdicts: list[trial.Verdict] = []
    with forked_ranks(), fault_session(SILENCE * arguments.patience) as made:
        for fault in table.choose(arguments.count, arguments.seed, kinds):
            verdicts.append(verdict := trial.try_out(made, fault, arguments.patience))
            seconds = "     -" if verdict.seconds is None else f"{verdict.seconds:6.2f}"
            print(f"{len(verdicts):4} {'FAILED' if verdict.problems else 'ok':6} {seconds} s  {fault}", flush=True)
            if verdict.problems:
                print("\n".join(verdict.problems), f"the error: {verdict.error}", sep="\n", flush=True)
            every = [asdict(verdict) | {"fault": str(verdict.fault)} for verdict in verdicts]
            keep(arguments.out, model="tiny Flux, random weights, 3 + 5 blocks, fp32", seed=arguments.seed, all=every)
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(verdicts)} faults, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
