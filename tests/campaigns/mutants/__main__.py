"""`python -m tests.campaigns.mutants [--only NAME,...] [--tier quick|default] [--out FILE.json]`

Makes one small change to the product after the other, in a copy of the repository, and runs the tests that belong to the
room: first those of the quick tier, then those of the default tier. Says which mutants lived. Exit status 1 if one lived, or
was caught by a later tier than it says.
"""

import argparse
import sys
from pathlib import Path

from ..result import keep
from .table import MUTANTS
from .trial import REPOSITORY, TIERS, copy_of, try_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants")
    parser.add_argument("--only", default="", help="names of mutants, comma between them")
    parser.add_argument("--tier", choices=tuple(TIERS), help="run the tests of this tier only")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    names = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"--only: no mutant is called {', '.join(sorted(unknown))}")
    tiers, verdicts = (arguments.tier,) if arguments.tier else tuple(TIERS), []
    with copy_of(REPOSITORY) as folder:
        for name in names:
            verdicts.append(try_out(folder, known[name], tiers))
            print(verdicts[-1], flush=True)
            found = {each.mutant.name: {"caught_by": each.caught_by, "test": each.test} for each in verdicts}
            keep(arguments.out, verdicts=found)
    lived = [verdict.mutant.name for verdict in verdicts if verdict.caught_by is None]
    print(f"{len(verdicts)} mutants, {len(lived)} lived: {', '.join(lived)}")
    return 0 if all(verdict.as_expected for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
