"""Models of real sizes in every mode: memory, kernels, bytes moved and sent, by tracing (trace.py). No device is needed.

    python -m benchmarks.sizes.table --out benchmarks/results/real_sizes_DATE.json
    python -m benchmarks.sizes.table --models flux-dev --ranks 1,2
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from parallel_backend.core.degrees import Degrees
from testing.real_sizes import REAL_MODELS

from .trace import figures, mode_name, predicted

RANKS = (1, 2, 4, 8)


def modes(ranks: Sequence[int]) -> Iterator[Degrees]:
    """Every mode at so many ranks; one rank has one."""
    for count in ranks:
        if count == 1:
            yield Degrees()
            continue
        for axis in ("ulysses", "ring", "tensor", "pipe"):
            yield Degrees(**{axis: count})
        yield Degrees(patch=count, patch_mode="displaced")


def row(name: str, degrees: Degrees) -> dict[str, Any]:
    """The traced figures by rank, and the memory model's bytes beside them. Ranks with equal figures are one row of "ranks"."""
    real = REAL_MODELS[name]
    traced = figures(real, degrees)
    needs = predicted(real, degrees, traced.request)
    ranks = [
        found | {"predicted": need.run - need.workspaces, "kept": need.buffers + need.arriving}
        for found, need in zip(traced.figures, needs, strict=True)
    ]
    return {"ranks": ranks}


def run(names: Sequence[str], ranks: Sequence[int], say: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows by "model, mode"."""
    for name in names:
        for degrees in modes(ranks):
            found = row(name, degrees)
            worst = max(found["ranks"], key=lambda each: abs(each["predicted"] / each["peak"] - 1))
            say(f"{name}, {mode_name(degrees)}: predicted over traced {worst['predicted'] / worst['peak']:.3f}")
            yield f"{name}, {mode_name(degrees)}", found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", type=lambda text: text.split(","), default=list(REAL_MODELS))
    options.add_argument("--ranks", type=lambda text: [int(count) for count in text.split(",")], default=list(RANKS))
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    cases: dict[str, Any] = {}
    for name, found in run(given.models, given.ranks, measuring.TimedLog()):
        cases[name] = found
        if given.out is not None:
            result = {"what": "real_sizes", "date": date.today().isoformat(), "cases": cases}
            given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
