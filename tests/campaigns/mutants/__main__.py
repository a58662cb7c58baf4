"""`python -m tests.campaigns.mutants [--only NAME,...] [--tier quick|default] [--list] [--out FILE.json]`

Makes one small change to the product after the other, in a copy of the repository, and runs the tests that belong to the
room: first those of the quick tier, then those of the default tier. Says which mutants lived. Exit status 1 if one lived, or
was caught by a later tier than it says.
"""

import argparse
import contextlib
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .mutant import Mutant
from .runner import REPOSITORY, Runner
from .table import MUTANTS
from .trial import TIERS, Verdict, confirmed, copy_of, try_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants")
    parser.add_argument("--only", default="", help="names of mutants, comma between them (see --list)")
    parser.add_argument("--tier", choices=tuple(TIERS), help="run the tests of this tier only")
    parser.add_argument("--list", action="store_true", help="name the mutants and do nothing")
    parser.add_argument("--out", type=Path, help="a JSON file; mutants in it that are not run keep their verdicts")
    arguments = parser.parse_args()
    if arguments.list:
        for mutant in MUTANTS:
            print(f"{mutant.room}: {mutant.name} ({mutant.tier})")
        return 0
    known = {mutant.name: mutant for mutant in MUTANTS}
    names = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"--only: no mutant is called {', '.join(sorted(unknown))}")
    tiers = (arguments.tier,) if arguments.tier else tuple(TIERS)
    began, verdicts = time.monotonic(), []
    earlier = json.loads(arguments.out.read_text())["verdicts"] if arguments.out and arguments.out.exists() else {}

    def write(verdicts: list[Verdict]) -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result(MUTANTS, earlier, verdicts), indent=1) + "\n")

    with copy_of(REPOSITORY) as folder, Runner() as runner:
        with contextlib.suppress(KeyboardInterrupt):  # what there is by then is reported
            for name in names:
                verdicts.append(try_out(runner, folder, known[name], tiers))
                print(verdicts[-1], flush=True)
                write(verdicts)
        first, verdicts = verdicts, confirmed(runner, folder, verdicts, tiers)
    for before, verdict in zip(first, verdicts, strict=True):
        if verdict is not before:
            print(f"{before.test} fails without a mutant too; {verdict}")
    write(verdicts)
    lived = [verdict.mutant.name for verdict in verdicts if verdict.caught_by is None]
    print(f"{len(verdicts)} mutants, {len(lived)} lived, {time.monotonic() - began:.0f} s")
    if lived:
        print(f"lived: {', '.join(lived)}")
    return 0 if len(verdicts) == len(names) and all(verdict.as_expected for verdict in verdicts) else 1


def result(mutants: tuple[Mutant, ...], before: dict[str, Any], verdicts: list[Verdict]) -> dict[str, Any]:
    """`before`: the mutants of an earlier result."""
    now = {
        verdict.mutant.name: {
            "file": verdict.mutant.file,
            "caught_by": verdict.caught_by,
            "test": verdict.test,
            "seconds": round(verdict.seconds, 1),
        }
        for verdict in verdicts
    }
    found = {mutant.name: entry for mutant in mutants if (entry := (before | now).get(mutant.name)) is not None}
    caught = [entry["caught_by"] for entry in found.values()]
    return {
        "what": "small changes to the product, and which tier of its tests noticed them first",
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()} CPU, {torch.multiprocessing.cpu_count()} cores, torch {torch.__version__}",
        "mutants": len(mutants),
        "tried": len(found),
        "caught_by_quick": caught.count("quick"),
        "caught_by_default": len(caught) - caught.count(None),
        "lived": [name for name, entry in found.items() if entry["caught_by"] is None],
        "verdicts": found,
    }


if __name__ == "__main__":
    sys.exit(main())
