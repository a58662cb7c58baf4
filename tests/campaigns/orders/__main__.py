"""The command: see the package."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from ..result import keep
from ..transport.runner import trials
from . import __doc__ as description
from .order import FILE, check, products


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.orders", description=description)
    parser.add_argument("--only", default="", help="products whose name has this")
    parser.add_argument("--renew", action="store_true", help=f"write {FILE.name} with what is found")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known, faults, operations, began = json.loads(FILE.read_text()), {}, 0, time.monotonic()
    cases = [case for case in products() if options.only in case.name]
    with tempfile.TemporaryDirectory() as folder, trials(Path(folder)) as at_work:
        for case in cases:
            found, count, wrong = check(at_work, case)
            operations += count
            if options.renew and not wrong:
                known[case.name] = found
                FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            elif not wrong and known.get(case.name) != found:
                wrong = f"the digest is {found}, not {known.get(case.name)}"
            if wrong:
                faults[case.name] = wrong
            print(f"{time.monotonic() - began:6.0f} s {case.name}: {count} operations, {wrong or found}", flush=True)
    seconds = round(time.monotonic() - began)
    print(f"{len(cases)} cases, {operations} operations, {seconds} s, {len(faults)} faults")
    keep(options.out, cases=len(cases), operations=operations, seconds=seconds, faults=faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
