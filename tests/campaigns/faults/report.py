"""What came of all faults, for people and as JSON."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .trial import Verdict


def by_kind(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    kinds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.fault.kind, []).append(verdict)
    return kinds


def table(verdicts: Sequence[Verdict], phases: Sequence[str]) -> str:
    """A row for each kind, a column for each phase: how many faults; then seconds to the error, median and worst."""
    width = max(len(kind) for kind in by_kind(verdicts))
    lines = [" ".join([" " * width, *(phase.rjust(max(4, len(phase))) for phase in phases), "  all", "median", " worst"])]
    for kind, those in by_kind(verdicts).items():
        count = Counter(verdict.fault.phase for verdict in those)
        cells = [str(count[phase] or "").rjust(max(4, len(phase))) for phase in phases]
        seconds = _seconds(those)
        times = [f"{statistics.median(seconds):6.2f}", f"{max(seconds):6.2f}"] if seconds else ["     -", "     -"]
        lines.append(" ".join([kind.ljust(width), *cells, f"{len(those):5}", *times]))
    return "\n".join(lines)


def failures(verdicts: Iterable[Verdict]) -> str:
    """Everything about the faults whose end was not as promised."""
    texts = []
    for verdict in verdicts:
        if verdict.problems:
            texts.append(f"FAILED {verdict.fault}\n" + "\n".join(verdict.problems) + f"\nthe error: {verdict.error}\n")
    return "\n".join(texts)


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts, seconds by kind, and each fault in a line with the first line of its error."""
    kinds = {}
    for kind, those in by_kind(verdicts).items():
        seconds = _seconds(those)
        kinds[kind] = {
            "faults": len(those),
            "failed": sum(bool(verdict.problems) for verdict in those),
            "median_seconds": round(statistics.median(seconds), 2) if seconds else None,
            "worst_seconds": round(max(seconds), 2) if seconds else None,
        }
    phases = Counter(verdict.fault.phase for verdict in verdicts)
    listed = [
        {
            "fault": str(verdict.fault),
            "seconds": None if verdict.seconds is None else round(verdict.seconds, 2),
            "error": None if verdict.error is None else verdict.error.partition("\n")[0][:200],
            "problems": verdict.problems,
        }
        for verdict in verdicts
    ]
    return {"kinds": kinds, "phases": dict(phases), "all": listed}


def _seconds(verdicts: Iterable[Verdict]) -> list[float]:
    return [verdict.seconds for verdict in verdicts if verdict.seconds is not None]
