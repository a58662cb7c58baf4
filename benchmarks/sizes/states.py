"""The memory model's figures of traced models (placement/traced_states.py), from a result of table.py.

python -m benchmarks.sizes.states benchmarks/results/real_sizes_DATE.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from parallel_backend.core.degrees import Degrees
from parallel_backend.placement import traced_states
from parallel_backend.placement.traced_states import RANKS, TracedStates
from testing.real_sizes import REAL_MODELS, RealModel

from .trace import mode_name

START, END = "    # traced: python -m benchmarks.sizes.states\n", "    # end of traced\n"


def states_of(name: str, cases: dict[str, Any]) -> TracedStates:
    """Of the rank that has most. ValueError for modes that are not in `cases`."""

    def states(degrees: Degrees) -> list[float]:
        key = f"{name}, {mode_name(degrees)}"
        if key not in cases:
            raise ValueError(f"{key} is not in the result")
        return [(rank["peak"] - rank["kept"]) / rank["state"] for rank in cases[key]["ranks"]]

    def along(axis: str) -> list[float]:
        named = {"patch_mode": "displaced"} if axis == "patch" else {}
        return [round(max(states(Degrees(**{axis: ranks}, **named) if ranks > 1 else Degrees())), 2) for ranks in RANKS]

    lists = _lists(REAL_MODELS[name], states(Degrees(pipe=2)))
    return TracedStates(*(tuple(along(axis)) for axis in ("tensor", "ulysses", "ring", "patch")), lists)


def _lists(real: RealModel, two_stages: list[float]) -> tuple[float, ...]:
    """`TracedStates.lists`: with two kinds of blocks, by the stages of two whose last blocks are of each kind."""
    if len(real.depths) == 1:
        return (1.0,)
    first, last = two_stages
    return round(first / last, 3), 1.0


def table(cases: dict[str, Any]) -> str:
    lines = []
    for name, real in REAL_MODELS.items():
        states = states_of(name, cases)
        rows = [f"{axis}={getattr(states, axis)}" for axis in ("tensor", "ulysses", "ring", "patch", "lists")]
        hidden = real.family.sizes.hidden(real.config)
        lines += [f'    ("{real.family_name}", {hidden}): TracedStates(', *(f"        {row}," for row in rows), "    ),"]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("result", type=Path)
    cases = json.loads(options.parse_args().result.read_text())["cases"]
    module = Path(traced_states.__file__)
    before, rest = module.read_text().split(START)
    _, after = rest.split(END)
    module.write_text(before + START + table(cases) + END + after)


if __name__ == "__main__":
    main()
