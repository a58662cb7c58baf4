"""Runs cases one by one: what comes of each, how long it takes, and how much memory all of them take."""

import contextlib
import random
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Case = Callable[[], str]
"""Does what is to be tried and says in a word or two what came of it. Whatever it raises is a defect."""

Make = Callable[[random.Random], Case]
"""From random numbers to a case. What it does itself is not judged."""

SECONDS = 20.0
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

    @property
    def count(self) -> int:
        return sum(self.outcomes.values()) + len(self.defects)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.kind}: {self.count} cases, {outcomes}, {len(self.defects)} defects"


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
def little_memory(room: int = ROOM) -> Iterator[None]:
    """An allocation beyond so much more fails, whether or not anything is written to it. Linux; mapped files are none."""
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
