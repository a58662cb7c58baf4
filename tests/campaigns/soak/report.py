"""A soak in words, as JSON and as a picture."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .record import CANCELLED, DELETED, FAILED, FINISHED, Soak
from .verdict import counts, problems, trends

COLUMNS = ("prompts", FINISHED, CANCELLED, DELETED, FAILED, "compared", "unequal")


def table(soak: Soak) -> str:
    """Prompts by setup, where they were cancelled, and memory before and after by process."""
    found = counts(soak.endings)
    lines = [f"{'':24}" + "".join(f"{name:>11}" for name in COLUMNS) + f"{'slowest':>10}"]
    for setup, row in sorted(found.items()):
        lines.append(f"{setup:24}" + "".join(f"{row[name]:11}" for name in COLUMNS) + f"{row['seconds']:8.1f} s")
    total = [sum(row[name] for row in found.values()) for name in COLUMNS]
    lines.append(f"{'all':24}" + "".join(f"{count:11}" for count in total))
    where = Counter(ending.where for ending in soak.endings if ending.status == CANCELLED)
    lines += ["", "cancelled in: " + (", ".join(f"{node} {count}" for node, count in where.most_common()) or "none")]
    lines += ["besides: " + (", ".join(f"{what} {count}" for what, count in soak.extras.items()) or "nothing"), ""]
    short = 0
    for trend in trends(soak):
        if trend.memory is None:
            short += 1
            continue
        worst = max(trend.states, key=lambda state: trend.states[state][1] / trend.states[state][0])
        early, late = (bytes / 1e6 for bytes in trend.memory)
        lines.append(
            f"{trend.role} ({trend.pid}), prompts {trend.first} to {trend.last}: {early:.1f} MB -> {late:.1f} MB, "
            f"{100 * trend.growth:+.2f} % with nothing loaded; by state at most "
            f"{100 * (trend.states[worst][1] / trend.states[worst][0] - 1):+.2f} % ({worst})"
        )
    lines.append(f"{short} processes did not live long enough to be compared with themselves")
    return "\n".join(lines)


def as_json(soak: Soak) -> dict[str, Any]:
    """Everything, with what was wrong first."""
    rows = {setup: dict(row) for setup, row in sorted(counts(soak.endings).items())}
    found = [{**asdict(trend), "growth": trend.growth} for trend in trends(soak)]
    return {"problems": problems(soak), "counts": rows, "trends": found, **asdict(soak)}


def write(soak: Soak, path: Path) -> None:
    """The JSON at `path`, and beside it a picture of the same name."""
    path.write_text(json.dumps(as_json(soak), indent=1) + "\n")
    draw(soak, path.with_suffix(".png"))


def draw(soak: Soak, path: Path) -> None:
    """Memory of each process over the prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    both = figure.subplots(2, 1, sharex=True)
    for plot, server in zip(both, (True, False), strict=True):
        for role, pid in dict.fromkeys((reading.role, reading.pid) for reading in soak.readings):
            if (role == "ComfyUI") == server:
                own = [reading for reading in soak.readings if reading.pid == pid]
                plot.plot(
                    [r.number for r in own], [r.allocated / 1e6 for r in own], ".-", markersize=3, linewidth=0.6, label=role
                )
        plot.set_ylabel("ComfyUI, MB" if server else "ranks, MB")
        plot.axvline(soak.lived, color="grey", linewidth=0.6)
    both[1].set_xlabel("prompts")
    figure.savefig(path, dpi=110)
