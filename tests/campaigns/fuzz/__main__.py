"""The command: all kinds of cases, counted by what came of them."""

import argparse
import json
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path

from parallel_backend.placement.links import Link, Links, alike
from parallel_backend.planning.calibrated_costs import BlockCost, Calibration, DeviceCost
from parallel_backend.planning.machine import Device, Machine
from testing.fork_server import forked_ranks
from tests.wire.test_messages import MESSAGES

from . import files, messages, ranks, settings
from .runner import Report, little_memory, peak_bytes, run

SHARES = {
    "headers of messages": 0.30,
    "streams of messages": 0.15,
    "bytes from a rank": 0.05,
    "safetensors": 0.20,
    "gguf": 0.16,
    "calibrations": 0.05,
    "settings": 0.07,
    "bytes to a rank": 0.02,
}
"""Of all cases."""


def calibration() -> Calibration:
    block = BlockCost(1e-3, 1e-6, 1e-9)
    machine = Machine((Device("cpu", "x86"),) * 2, Links(alike(2, Link(1e-5, 1e9))))
    return Calibration(machine, (DeviceCost({"blocks": block}, block),) * 2, hop=1e-3)


def run_all(count: int, seed: int, only: list[str]) -> list[Report]:
    """Ranks last: they are processes of their own, which no limit on this one's memory is meant for."""
    reports = []
    with files.scratch() as name:
        folder = Path(name)
        places = {part: folder / part for part in ("single", "calibrations")}
        for place in places.values():
            place.mkdir()
        models = files.sound_models()
        kinds = {
            "headers of messages": messages.headers(MESSAGES),
            "streams of messages": messages.streams(MESSAGES),
            "bytes from a rank": ranks.into_client(MESSAGES),
            "safetensors": files.safetensors(models, places["single"]),
            "gguf": files.gguf(models, places["single"]),
            "calibrations": files.calibrations(calibration(), places["calibrations"]),
            "settings": settings.make,
            "bytes to a rank": ranks.into_rank(MESSAGES),
        }
        for kind, make in kinds.items():
            if only and kind not in only:
                continue
            number = max(1, round(count * SHARES[kind]))
            if kind == "bytes to a rank":
                with forked_ranks():
                    reports.append(run(kind, make, number, seed))
            else:
                with little_memory():
                    reports.append(run(kind, make, number, seed))
            sys.stdout.write(f"{reports[-1]}\n")
            sys.stdout.flush()
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(SHARES)}")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    started, before = time.monotonic(), peak_bytes()
    reports = run_all(options.count, options.seed, options.only)
    seconds, peak = time.monotonic() - started, peak_bytes()
    defects = sum(len(report.defects) for report in reports)
    total = sum(report.count for report in reports)
    sys.stdout.write(
        f"{total} cases in {seconds:.0f} s, {defects} defects; memory at the peak {peak / 1e6:.0f} MB, "
        f"{before / 1e6:.0f} MB before\n"
    )
    for report in reports:
        for number, text in list(report.defects.items())[:5]:
            sys.stdout.write(f"\n{report.kind}, case {number} (seed {options.seed}):\n{text}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(result(options, reports, seconds, before, peak), indent=1) + "\n")
    return 1 if defects else 0


def result(options: argparse.Namespace, reports: list[Report], seconds: float, before: int, peak: int) -> dict:
    return {
        "date": date.today().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": options.seed,
        "cases": sum(report.count for report in reports),
        "defects": sum(len(report.defects) for report in reports),
        "seconds": round(seconds, 1),
        "bytes_before": before,
        "bytes_at_the_peak": peak,
        "kinds": {
            report.kind: {
                "cases": report.count,
                "outcomes": dict(report.outcomes),
                "defects": len(report.defects),
                "slowest_seconds": round(report.slowest[0], 3),
                "slowest_case": report.slowest[1],
            }
            for report in reports
        },
    }


if __name__ == "__main__":
    sys.exit(main())
