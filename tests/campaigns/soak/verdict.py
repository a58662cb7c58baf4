"""What a soak shows: everything that must not be."""

from collections.abc import Iterator
from statistics import median

from .record import CANCELLED, EMPTY, FAILED, FINISHED, Ending, Soak

GROWTH = 0.02
"""Of a process's memory with nothing loaded, from the second round to the last one."""
MORE = 2
"""File descriptors or threads that a process may have more at the end, with nothing loaded, than before."""


def problems(soak: Soak) -> list[str]:
    """In words, one for each thing that is wrong; empty if all is well."""
    found = [f"prompt {ending.number} ({ending.request}): {text}" for ending in soak.endings if (text := _wrong(ending))]
    found += soak.failures
    for pid, role in {reading.pid: reading.role for reading in soak.readings}.items():
        found += _grown(soak, pid, role)
    most = max((reading.files for reading in soak.readings), default=0)
    if most > 1:
        found.append(f"{most} temporary files or folders at once, where one pool has one")
    return found + [f"left after the end: {what}" for what in soak.left]


def _wrong(ending: Ending) -> str | None:
    if ending.status == FAILED:
        return ending.error
    if ending.status == CANCELLED and not ending.cancel:
        return "was cancelled, though nobody asked for it"
    if ending.status == FINISHED and ending.difference != 0:
        return f"differs from the same request alone by {ending.difference:.3g}"
    return None


def _grown(soak: Soak, pid: int, role: str) -> Iterator[str]:
    """From the second round to the last one: what is loaded or compiled at first use is there after the first."""
    empty = [reading for reading in soak.readings if reading.pid == pid and reading.state == EMPTY]
    early = [reading for reading in empty if soak.window < reading.number <= 2 * soak.window]
    late = [reading for reading in empty if soak.lived - soak.window < reading.number <= soak.lived]
    if soak.lived < 3 * soak.window or not early or not late:
        return

    def both(what: str) -> Iterator[float]:
        return (median(getattr(reading, what) for reading in some) for some in (early, late))

    before, after = both("allocated")
    if after >= (1 + GROWTH) * before:
        yield f"{role} grew by {100 * (after / before - 1):.1f} % from {before / 1e6:.1f} MB"
    for what in ("descriptors", "threads"):
        before, after = both(what)
        if after > before + MORE:
            yield f"{role} has {after:g} {what} with nothing loaded, {before:g} before"
