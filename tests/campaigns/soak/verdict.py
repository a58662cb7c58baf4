"""What a soak shows: how far memory and counts have moved, and everything that must not be."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from .record import CANCELLED, EMPTY, FAILED, FINISHED, Ending, Reading, Soak
from .schedule import SETTLED

GROWTH = 0.02
"""Of a process's memory with nothing loaded, from the first round after SETTLED prompts to the last round."""
MORE = 2
"""File descriptors or threads that a process may have more at the end, with nothing loaded, than before."""


@dataclass(frozen=True)
class Trend:
    """A process over its prompts `first` to `last`: medians over each round, (early, late).

    `memory`, `descriptors` and `threads` with nothing loaded; `states`: memory by what was used last. Memory in bytes. None
    where the process did not live through two rounds after SETTLED prompts.
    """

    role: str
    pid: int
    first: int
    last: int
    memory: tuple[float, float] | None = None
    states: dict[str, tuple[float, float]] | None = None
    descriptors: tuple[float, float] | None = None
    threads: tuple[float, float] | None = None

    @property
    def growth(self) -> float | None:
        """Of the memory with nothing loaded. With models on the ranks it tells nothing: how many of them there are, and so
        what a process holds, depends on what came before in either round."""
        return None if self.memory is None else self.memory[1] / self.memory[0] - 1


def trends(soak: Soak) -> list[Trend]:
    """Of every process, in order of their start."""
    by_process: dict[tuple[str, int], list[Reading]] = defaultdict(list)
    for reading in soak.readings:
        by_process[reading.role, reading.pid].append(reading)
    return [_trend(role, pid, readings, soak) for (role, pid), readings in by_process.items()]


def _trend(role: str, pid: int, readings: list[Reading], soak: Soak) -> Trend:
    first, last = readings[0].number, readings[-1].number
    end = min(last, soak.lived)
    early = [reading for reading in readings if SETTLED < reading.number <= SETTLED + soak.window]
    late = [reading for reading in readings if end - soak.window < reading.number <= end]
    common = {reading.state for reading in early} & {reading.state for reading in late} - {""}
    if first > SETTLED or end < SETTLED + 2 * soak.window or EMPTY not in common:
        return Trend(role, pid, first, last)

    def both(name: str, state: str) -> tuple[float, float]:
        found = (median(getattr(reading, name) for reading in some if reading.state == state) for some in (early, late))
        return next(found), next(found)

    states = {state: both("allocated", state) for state in sorted(common)}
    return Trend(role, pid, first, last, states[EMPTY], states, both("descriptors", EMPTY), both("threads", EMPTY))


def problems(soak: Soak) -> list[str]:
    """In words, one for each thing that is wrong; empty where all is well."""
    found = [f"prompt {ending.number} ({ending.request}): {text}" for ending in soak.endings if (text := _wrong(ending))]
    found += soak.failures
    for trend in trends(soak):
        found += _grown(trend)
    found += [
        f"{reading.role} has {reading.shared} segments of shared memory after prompt {reading.number}"
        for reading in _first_of_each(reading for reading in soak.readings if reading.shared)
    ]
    most = max((reading.files for reading in soak.readings), default=0)
    if most > 1:
        found.append(f"{most} temporary files or folders at once, where one pool has one")
    return found + [f"left after the end: {what}" for what in soak.left]


def _wrong(ending: Ending) -> str | None:
    if ending.status == FAILED:
        return ending.error
    if ending.status == CANCELLED and not ending.cancel:
        return f"was cancelled in {ending.where}, though nobody asked for it"
    if ending.status == FINISHED and not ending.computed:
        return "was not computed, so nothing was compared"
    if ending.status == FINISHED and ending.difference != 0:
        return f"differs from the same request alone by {ending.difference:.3g}"
    return None


def _grown(trend: Trend) -> list[str]:
    found = []
    if trend.growth is not None and trend.growth >= GROWTH:
        found.append(f"{trend.role} grew by {100 * trend.growth:.1f} % from {trend.memory[0] / 1e6:.1f} MB")
    for what in ("descriptors", "threads"):
        early, late = getattr(trend, what) or (0, 0)
        if late > early + MORE:
            found.append(f"{trend.role} has {late:g} {what} with nothing loaded, {early:g} before")
    return found


def _first_of_each(readings: Iterable[Reading]) -> list[Reading]:
    found: dict[int, Reading] = {}
    for reading in readings:
        found.setdefault(reading.pid, reading)
    return list(found.values())


def counts(endings: Iterable[Ending]) -> dict[str, Counter]:
    """By setup: how many prompts of each status, 'compared' and 'unequal'; and 'seconds', of its slowest."""
    found: dict[str, Counter] = defaultdict(Counter)
    for ending in endings:
        row = found[ending.setup]
        row[ending.status] += 1
        row["prompts"] += 1
        row["compared"] += ending.difference is not None
        row["unequal"] += ending.difference not in (None, 0.0)
        row["seconds"] = max(row["seconds"], ending.seconds)
    return found
