"""Runs cases one by one: what comes of each, how long it takes, and how much memory all of them take."""

import argparse
import contextlib
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.result import keep

Case = Callable[[], str]
"""Does what is to be tried and says in a word or two what came of it. Whatever it raises is a defect."""

Make = Callable[[random.Random], Case]
"""From random numbers to a case. What it does itself is not judged."""

Kinds = dict[str, tuple[float, Callable[[], AbstractContextManager[Make]]]]
"""By name the share of all cases, and what makes them, as long as it is open."""

SECONDS = 60.0
"""For one case. Far more than any takes, on a machine that does other things too."""
ROOM = 2 << 30
"""Bytes for all cases together, beside what the process has when they begin."""


class Hang(BaseException):
    """A case took more than its time. No Exception, so that nothing under test can take it for one of its own."""


@dataclass
class Report:
    """What came of the cases of one kind. `defects`: by the case's number, what it raised."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    defects: dict[int, str] = field(default_factory=dict)


def command(prog: str, what: str, kinds: Kinds) -> int:
    """The command line of a campaign. Its exit status: 1 for any defect."""
    parser = argparse.ArgumentParser(prog=prog, description=what)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(kinds), help=f"of {', '.join(kinds)}")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    reports = []
    for kind in [kind for kind in kinds if kind in options.only]:
        share, opened = kinds[kind]
        with opened() as make:
            report = run(kind, make, max(1, round(options.count * share)), options.seed)
        reports.append(vars(report))
        print(f"{kind}: {dict(report.outcomes)}, {len(report.defects)} defects", flush=True)
        for number, text in list(report.defects.items())[:5]:
            print(f"\ncase {number} (seed {options.seed}):\n{text}")
    keep(options.out, what=what, seed=options.seed, kinds=reports)
    return int(any(report["defects"] for report in reports))


def run(kind: str, make: Make, count: int, seed: int) -> Report:
    """So many cases of a kind. Main thread only: an alarm ends a case that hangs."""
    report = Report(kind)
    for number in range(count):
        case = make(random.Random(f"{seed} {kind} {number}"))
        try:
            with alarm(SECONDS):
                report.outcomes[case()] += 1
        except (Exception, Hang):
            report.defects[number] = traceback.format_exc()
    return report


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises Hang in the main thread when the time is over."""

    def ring(*_: object) -> None:
        raise Hang(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def little_memory(make: Make) -> Iterator[Make]:
    """An allocation beyond ROOM fails, whether or not anything is written to it. Linux; mapped files are none."""
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + ROOM, hard))
    try:
        yield make
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
