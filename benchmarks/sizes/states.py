"""The memory model's figures of traced models (placement/traced_states.py), from a result of table.py.

python -m benchmarks.sizes.states benchmarks/results/real_sizes_DATE.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from parallel_backend.core.degrees import Degrees
from parallel_backend.placement import traced_states
from parallel_backend.placement.balance import even_stages
from parallel_backend.placement.traced_states import RANKS, TracedStates
from testing.real_sizes import REAL_MODELS, RealModel

from .trace import mode_name

SENT = 2
"""Hidden states that a pipeline's first stage has sent, and holds."""
START, END = "    # traced: python -m benchmarks.sizes.states\n", "    # end of traced\n"


def states_of(name: str, cases: dict[str, Any]) -> TracedStates:
    """Of the rank that has most. A mode that is not in `cases` has the most that it can have: no more bytes than half as
    many ranks."""

    def states(degrees: Degrees) -> list[float]:
        ranks = cases.get(f"{name}, {mode_name(degrees)}", {"ranks": ()})["ranks"]
        return [(rank["peak"] - rank["kept"]) / rank["state"] for rank in ranks]

    def along(axis: str) -> list[float]:
        named, found = {"patch_mode": "displaced"} if axis == "patch" else {}, []
        for ranks in RANKS:
            traced = states(Degrees(**{axis: ranks}, **named) if ranks > 1 else Degrees())
            # A rank's tokens halve with each doubling, but for tensor ranks, which have all of them.
            most = max(traced) if traced else found[-1] * (1 if axis == "tensor" else 2)
            found.append(round(most, 2))
        return found

    stages = _stages(REAL_MODELS[name])
    lists = (1.0,) if stages is None else (round((states(Degrees(pipe=stages))[0] - SENT) / states(Degrees())[0], 3), 1.0)
    return TracedStates(*(tuple(along(axis)) for axis in ("tensor", "ulysses", "ring", "patch")), lists)


def _stages(real: RealModel) -> int | None:
    """The fewest stages, of RANKS, of which the first has blocks of the first kind alone. None: there is one kind."""
    if len(real.depths) == 1:
        return None
    first, *others = (real.config[name] for name in real.depths)
    return next(stages for stages in RANKS if even_stages(first + sum(others), stages)[0].stop <= first)


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
