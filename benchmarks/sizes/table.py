"""Flux of real size in every mode, by the bundled class: memory, kernels, bytes moved and sent, by tracing (trace.py). No
device is needed.

python -m benchmarks.sizes.table --out benchmarks/results/real_sizes_DATE.json
python -m benchmarks.sizes.table --out FILE --ranks 1,2
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import measuring
from benchmarks.sizes.real_models import FLUX_DEV
from parallel_backend.core.degrees import Degrees
from parallel_backend.placement.memory_model import Request

from .native import native_figures
from .trace import figures, mode_name, predicted

NAME = "flux-dev"
RANKS = (1, 2, 4, 8)
SHOWN = 6
"""Operations of a row's "by name"."""


def modes(ranks: Sequence[int]) -> Iterator[Degrees]:
    """Every mode at so many ranks; one rank has one."""
    for count in ranks:
        if count == 1:
            yield Degrees()
            continue
        for axis in ("ulysses", "ring", "tensor", "pipe"):
            yield Degrees(**{axis: count})
        yield Degrees(patch=count, patch_mode="displaced")


def row(degrees: Degrees) -> dict[str, Any]:
    """A row of the result.

    "ranks": the traced figures by rank. "request": the memory model's record of the run. "by name": kernels and bytes moved
    in a step of rank 0 by operation, those that move most.
    """
    traced = figures(FLUX_DEV, degrees)
    first = traced.figures[0]
    moved = sorted(
        (text.removeprefix("moved ") for text in first if text.startswith("moved ")),
        key=lambda each: -first[f"moved {each}"],
    )
    return {
        "ranks": [
            {text: value for text, value in each.items() if not text.startswith(("moved ", "count "))}
            for each in traced.figures
        ],
        "request": asdict(traced.request),
        "by name": {each: (first[f"count {each}"], first[f"moved {each}"]) for each in moved[:SHOWN]},
    }


def with_predictions(degrees: Degrees, found: dict[str, Any]) -> dict[str, Any]:
    """The row with the memory model's bytes of each rank: "predicted" beside "peak", "kept" of that in keys and values, and
    "state", a hidden state of the rank's tokens."""
    gone = "padding", "looked_at", "picture"  # of results before 2026-12-01
    known = {name: value for name, value in found["request"].items() if name not in gone}
    request = Request(**known | {"grid": tuple(known["grid"])})
    for each, need, kept, state in zip(found["ranks"], *predicted(FLUX_DEV, degrees, request), strict=True):
        each |= {"predicted": need.run, "kept": kept, "state": state}
    return found


def axes_of(degrees: Degrees) -> list[str]:
    """Axes with several ranks."""
    return [axis for axis in ("ulysses", "ring", "tensor", "pipe", "patch") if getattr(degrees, axis) > 1]


def worst(found: dict[str, Any]) -> float:
    """Predicted over traced bytes, of the rank where they are furthest apart."""
    return max((each["predicted"] / each["peak"] for each in found["ranks"]), key=lambda ratio: abs(ratio - 1))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=lambda text: [int(count) for count in text.split(",")], default=list(RANKS))
    options.add_argument("--axis", choices=("ulysses", "ring", "tensor", "pipe", "patch"), help="this mode alone")
    options.add_argument("--comfyui", type=Path, help="a checkout: its own class is traced too")
    options.add_argument("--predict", type=Path, help="a result whose predictions are made anew")
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    say, before = (
        measuring.TimedLog(),
        json.loads(given.predict.read_text()) if given.predict else {"cases": {}, "native": {}},
    )
    result = {"what": "real_sizes", "date": date.today().isoformat(), "cases": {}, "native": dict(before["native"])}
    for degrees in modes(given.ranks):
        key = f"{NAME}, {mode_name(degrees)}"
        if (given.predict and key not in before["cases"]) or given.axis not in (None, *axes_of(degrees)):
            continue
        found = before["cases"][key] if given.predict else row(degrees)
        result["cases"][key] = with_predictions(degrees, found)
        say(f"{key}: predicted over traced {worst(found):.3f}")
        given.out.write_text(json.dumps(result) + "\n")
    if given.comfyui is not None:
        result["native"][NAME] = native_figures(given.comfyui.resolve(), FLUX_DEV)
        given.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
