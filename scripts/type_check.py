"""Checks types with mypy, and holds each file to the number of errors that it is known to have.

    python scripts/type_check.py           fails if a file has more errors than scripts/type_errors.json says, or fewer
    python scripts/type_check.py --shrink  writes the smaller numbers; a larger one still fails

The rooms of WITHOUT_ERRORS have none and stay so. mypy's settings are in pyproject.toml.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from mypy import api

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ROOT / "scripts" / "type_errors.json"
WITHOUT_ERRORS = ("nodes", *(f"parallel_backend/{room}" for room in ("client", "core", "processes", "wire")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shrink", action="store_true", help="write the numbers of files that have fewer errors now")
    given = parser.parse_args()
    known: dict[str, int] = json.loads(KNOWN.read_text())
    assert not [path for path in known if path.startswith(WITHOUT_ERRORS)], "a room without errors has an entry"

    report, failure, status = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"])
    if status not in (0, 1):  # mypy itself failed: a crash, or settings that it does not understand
        print(report, failure, file=sys.stderr)
        return status
    errors = [line for line in report.splitlines() if ": error:" in line]
    counts = Counter(re.split(r":\d+", line, maxsplit=1)[0] for line in errors)

    more = {path for path, count in counts.items() if count > known.get(path, 0)}
    fewer = {path: counts[path] for path, count in known.items() if counts[path] < count}
    for line in errors:
        if line.startswith(tuple(f"{path}:" for path in more)):
            print(line)
    for path in sorted(more):
        print(f"{path}: {counts[path]} errors, {known.get(path, 0)} are known", file=sys.stderr)
    if fewer and given.shrink:
        smaller = {path: count for path, count in (known | fewer).items() if count}
        KNOWN.write_text(json.dumps(smaller, indent=2, sort_keys=True) + "\n")
    elif fewer:
        print("fewer errors than known: python scripts/type_check.py --shrink, and commit", *sorted(fewer), file=sys.stderr)
    print(f"types: {sum(counts.values())} errors in {len(counts)} files, none in {', '.join(WITHOUT_ERRORS)}" * (not more))
    return int(bool(more or (fewer and not given.shrink)))


if __name__ == "__main__":
    sys.exit(main())
