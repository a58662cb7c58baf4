"""`python -m tests.campaigns.faults [--count 200] [--seed N] [--only KIND,...] [--patience FACTOR] [--fast]
[--out FILE.json]`

Injects that many faults, one after the other, and says what came of each: a named error in time (or the right result), the
right result of the next prompt, nothing left behind. Then kills clients in every phase. Exit status 1 if anything failed or
was left out by Ctrl-C.
"""

import argparse
import contextlib
import json
import logging
import platform
import sys
import time
from datetime import date
from pathlib import Path

import torch

from tests.support.fork_server import forked_ranks

from . import orphans, report, table, trial
from .session import fault_session

SILENCE = 3.0


def hardware() -> str:
    cores = torch.multiprocessing.cpu_count()
    return f"{platform.machine()} CPU, {cores} cores, 1 thread per rank, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"kinds, comma between them: {', '.join([*table.KINDS, orphans.KIND])}")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits, for a machine with other work")
    parser.add_argument(
        "--fast", action="store_true", help="ranks are forked with all imported, not started as they really are"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("parallel_backend").addHandler(logging.NullHandler())  # every fault is warned of
    every = [*table.KINDS, orphans.KIND]
    kinds = [kind.strip() for kind in arguments.only.split(",") if kind.strip()] or every
    if unknown := set(kinds) - set(every):
        parser.error(f"--only: no kind of fault is called {', '.join(sorted(unknown))}")
    possible = len({place for place in table.all_places() if place[0] in kinds})
    killed = orphans.all_faults(arguments.seed) if orphans.KIND in kinds else []
    count = arguments.count if kinds != [orphans.KIND] else 0
    chosen = table.choose(count, arguments.seed, kinds)
    print(f"{len(chosen)} faults of {possible} places x moments, {len(killed)} times the client killed", flush=True)
    began, verdicts = time.monotonic(), []

    def note(verdict: trial.Verdict) -> None:
        verdicts.append(verdict)
        seconds = "     -" if verdict.seconds is None else f"{verdict.seconds:6.2f}"
        print(f"{len(verdicts):4} {'FAILED' if verdict.problems else 'ok':6} {seconds} s  {verdict.fault}", flush=True)
        if verdict.problems:
            print(report.failures([verdict]), flush=True)

    with contextlib.suppress(KeyboardInterrupt):  # what there is by then is reported
        if chosen:
            with (
                forked_ranks() if arguments.fast else contextlib.nullcontext(),
                fault_session(SILENCE * arguments.patience) as made,
            ):
                for fault in chosen:
                    note(trial.try_out(made, fault, arguments.patience))
        for fault in killed:
            note(orphans.try_out(fault, arguments.patience))
    phases = [phase for phase in table.EVENTS if any(verdict.fault.phase == phase for verdict in verdicts)]
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    if verdicts:
        print(f"\n{report.table(verdicts, phases)}\n")
    print(f"{len(verdicts)} faults, {failed} failed, {time.monotonic() - began:.0f} s")
    if arguments.out is not None:
        head = {
            "what": "faults injected into ranks",
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "model": "tiny Flux, random weights, 3 + 5 blocks, fp32",
            "scope": "a prompt is an exact call and a run of 4 steps; limits "
            + f"x {arguments.patience}"
            + (", ranks forked with all imported" if arguments.fast else ""),
            "seed": arguments.seed,
            "faults": len(verdicts),
            "failed": failed,
        }
        arguments.out.write_text(json.dumps(head | report.as_json(verdicts), indent=1) + "\n")
    return 1 if failed or len(verdicts) < len(chosen) + len(killed) else 0


if __name__ == "__main__":
    sys.exit(main())
