"""Ratios of several ranks to one, which the memory model is fitted to (states_by_ranks), from a result of table.py.

python -m benchmarks.sizes.states benchmarks/results/real_sizes_DATE.json
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from parallel_backend.core.degrees import Degrees

from .trace import mode_name

RANKS = (1, 2, 4, 8)


def on_axis(axis: str, count: int) -> Degrees:
    named = {"patch_mode": "displaced"} if axis == "patch" and count > 1 else {}
    return Degrees(**{axis: count}, **named)


def ratios(cases: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """By axis, for each of RANKS, the median over all models of the rank that has most. A mode that was not traced has the
    most that it can have: no more bytes than half as many ranks."""

    def along(name: str, axis: str) -> list[float]:
        found: list[float] = []
        for count in RANKS:
            ranks = cases.get(f"{name}, {mode_name(on_axis(axis, count))}", {"ranks": ()})["ranks"]
            states = [(rank["peak"] - rank["kept"]) / rank["state"] for rank in ranks]
            # A rank's tokens halve with each doubling, but for tensor ranks, which have all of them.
            found.append(max(states) if states else found[-1] * (1 if axis == "tensor" else 2))
        return [each / found[0] for each in found]

    names = {key.partition(",")[0] for key in cases}
    return {
        axis: tuple(round(statistics.median(each), 2) for each in zip(*(along(name, axis) for name in names), strict=True))
        for axis in ("tensor", "ulysses", "ring", "patch")
    }


if __name__ == "__main__":
    print(ratios(json.loads(Path(sys.argv[1]).read_text())["cases"]))
