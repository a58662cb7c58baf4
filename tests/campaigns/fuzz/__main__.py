"""The command: all kinds of cases, counted by what came of them."""

import argparse
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from testing.fork_server import forked_ranks
from tests.wire.test_messages import MESSAGES

from . import messages, ranks
from .runner import Report, little_memory, run

SHARES = {
    "headers of messages": 0.6,
    "streams of messages": 0.3,
    "bytes from a rank": 0.08,
    "bytes to a rank": 0.02,
}
"""Of all cases."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=SHARES, help=f"of {', '.join(SHARES)}")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    reports: list[Report] = []
    kinds = {
        "headers of messages": messages.headers(MESSAGES),
        "streams of messages": messages.streams(MESSAGES),
        "bytes from a rank": ranks.into_client(MESSAGES),
        "bytes to a rank": ranks.into_rank(MESSAGES),
    }
    for kind in [kind for kind in kinds if kind in options.only]:
        # Ranks are processes of their own, which no limit on this one's memory is meant for.
        with forked_ranks() if kind == "bytes to a rank" else little_memory():
            reports.append(run(kind, kinds[kind], max(1, round(options.count * SHARES[kind])), options.seed))
        print(reports[-1], flush=True)
        for number, text in list(reports[-1].defects.items())[:5]:
            print(f"\ncase {number} (seed {options.seed}):\n{text}")
    if options.out is not None:
        options.out.write_text(json.dumps(result(options.seed, reports), indent=1) + "\n")
    return int(any(report.defects for report in reports))


def result(seed: int, reports: list[Report]) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": seed,
        "kinds": {each.kind: {"outcomes": each.outcomes, "defects": len(each.defects)} for each in reports},
    }


if __name__ == "__main__":
    sys.exit(main())
